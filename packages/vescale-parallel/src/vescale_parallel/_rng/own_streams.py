"""Random numbers of which it is not known where they are in those of one device.

Each rank draws them from a stream of its own; in pipelines each stage does, and each replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import named_failures
from vescale_parallel._mesh.mesh import DATA_AXES, axis_rank, axis_size
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._trace.generators import forked_generators, generator_state

from .known_draws import Place, ShardedDraw


@contextlib.contextmanager
def own_stream(position: int) -> Iterator[None]:
    """Draw from a stream that one number of the default generator seeds, and a position.

    The default generator stays the same on all ranks that draw alike from it.
    """
    seed = int(torch.randint(2**62, ()))
    with forked_generators(seed + position, cuda=torch.cuda.is_available()):
        yield


def own_position(place: Place, cut: ShardedDraw | None, num_slices: int, part: int) -> int:
    """Return a number that ranks have alike if they hold the same of what is drawn.

    ``part`` is this rank's of ``num_slices`` of a sequence.
    """
    position = place.part_of_batch if cut is None or cut.rows is not None else 0
    if cut is not None and cut.part is not None:
        position = position * place.tp_size + place.tp_rank
    return position * num_slices + part


class OwnStreams:
    """Seeds what forward draws by the position of this rank, all ranks having one generator."""

    def __init__(self, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
        self._position = 0
        for axis in ("pp", *DATA_AXES):
            self._position = self._position * axis_size(mesh, axis) + axis_rank(mesh, axis)
        self._is_cuda = mesh.device_type == "cuda"
        self._group = group
        self._draws: dict[object, bool] = {}
        self._has_warned = False

    @contextlib.contextmanager
    def of_call(self, form: object, why: str) -> Iterator[None]:
        """Draw for one call of the model; warn, once, if it draws, and say why it draws so.

        One number is drawn from the default generator, the same on every rank. It and the
        position of this rank on the data and pipeline axes seed what forward draws. Where a form
        of call draws nothing on any stage, which stages tell each other once, the default
        generator stays as it was: the loop draws from it, too.
        """
        held = torch.default_generator.get_state()
        seed = int(torch.randint(2**62, ()))
        is_new = form not in self._draws
        with forked_generators(seed + self._position, cuda=self._is_cuda):
            before = generator_state() if is_new or not self._has_warned else None
            yield
            draws = before is not None and generator_state() != before
        if draws and not self._has_warned:
            self._has_warned = True
            warn_at_user_line(
                "forward draws random numbers, for dropout for example, and it is not known "
                f"beforehand how many: {why}. So stages and data-parallel ranks of the pipeline "
                "draw from streams of their own: right in distribution, but not the numbers "
                "that one device draws"
            )
        if is_new:
            self._draws[form] = self._is_said_by_any(draws)
        if not self._draws[form]:
            torch.default_generator.set_state(held)

    def _is_said_by_any(self, says: bool) -> bool:
        """Whether any stage says yes. Every rank of the pipeline must call this."""
        told = torch.tensor(says, dtype=torch.uint8, device="cuda" if self._is_cuda else "cpu")
        with named_failures():
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        return bool(told)

"""Random numbers of pipelines: every part of a batch has a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._mesh.mesh import axis_rank, axis_size
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._trace.generators import forked_generators

from .sharded_rng import generator_state


class OwnStreams:
    """Seeds what forward draws by the position of this rank, all ranks having one generator."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._position = 0
        for axis in ("pp", "dp_replicate", "dp_shard"):
            self._position = self._position * axis_size(mesh, axis) + axis_rank(mesh, axis)
        self._is_cuda = mesh.device_type == "cuda"
        self._has_drawn = False

    @contextlib.contextmanager
    def of_call(self) -> Iterator[None]:
        """Draw for one call of the model; warn, once, if it draws.

        One number is drawn from the default generator, the same on every rank. It and the
        position of this rank on the data and pipeline axes seed what forward draws.
        """
        seed = int(torch.randint(2**62, ()))
        with forked_generators(seed + self._position, cuda=self._is_cuda):
            before = None if self._has_drawn else generator_state()
            yield
            if before is not None and generator_state() != before:
                self._has_drawn = True
                warn_at_user_line(
                    "forward draws random numbers, for dropout for example. Stages and "
                    "data-parallel ranks of a pipeline draw from streams of their own: right in "
                    "distribution, but not the numbers that one device draws"
                )

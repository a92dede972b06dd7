"""Random numbers of a pipeline: every stage draws what one device draws for its micro-batches."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor.random import Point
from vescale_parallel._mesh.agreement import gathered_objects
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._mesh.mesh import data_groups
from vescale_parallel._model.code import mix_in
from vescale_parallel._model.copies import copied_without_values, pairs
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.threads import in_fresh_thread

from .forward_draws import ForwardDraws, Given, UnknownDrawsError, draws_of_forward
from .host_generators import HostPass, HostStep, Places, moved, places, refuse_unseen, set_places
from .moves import Moves
from .own_streams import OwnStreams
from .stage_passes import StagePass, StepPoints, repeated

_MOST_FORMS = 512
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass(frozen=True)
class _Found:
    """What is known of one form of micro-batch; ``why`` it is not, if there are no draws."""

    draws: ForwardDraws | None
    why: str = ""

    @property
    def draws_some(self) -> bool:
        return self.draws is None or bool(self.draws.total) or bool(self.draws.host)


@dataclass(frozen=True)
class _Agreed:
    """What ranks found of one form of call: whether one draws, and why it is not known."""

    draws_some: bool
    why: str


class PassBorders:
    """Tells the pass that runs when it enters and leaves modules that a stage may own.

    Attributes:
        now: The pass; None if there is none, or it draws nothing.
    """

    now: StagePass | None = None

    def install(self, model: nn.Module, modules: Iterable[str]) -> None:
        """Watch modules that are staged already, in place, each by the first of its names."""
        for fqn in modules:
            module = model.get_submodule(fqn)
            if "_vescale_border" not in vars(module):
                mix_in(module, _Bordered)
                object.__setattr__(module, "_vescale_border", (self, fqn))


class _Bordered(nn.Module):
    """Mixed into the class of a staged module, so that a pass hears of its calls."""

    _vescale_border: tuple[PassBorders, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        borders, fqn = self._vescale_border
        now = borders.now
        if now is None:
            return super().__call__(*args, **kwargs)
        now.entered(fqn)
        try:
            output = super().__call__(*args, **kwargs)
        except Exception:
            raise
        except BaseException:  # a stage leaves forward behind its last module
            now.left(fqn, goes_on=False)
            raise
        now.left(fqn, goes_on=True)
        return output


class StageDraws:
    """Has the passes of one rank draw what one device draws; see [Note: draws of a pipeline].

    Args:
        model: Whole still; it is copied without values.
        stages_of: The stage of every call of each module that another stage may make, one for all
            calls; none inside of another.
        mesh: The plan's.
        ranks: Those that share the batch.
        dtype: Of the model's parameters in compute; None for their own.
        input_dtype: Of floating-point inputs; None for their own.
    """

    def __init__(
        self,
        model: nn.Module,
        stages_of: Mapping[str, Sequence[int]],
        mesh: DeviceMesh,
        ranks: DataRanks,
        dtype: torch.dtype | None = None,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self._model, self._whole, self._stages_of = model, copied_without_values(model), stages_of
        self._mesh, self._ranks = mesh, ranks
        self._dtype, self._input_dtype = dtype, input_dtype
        self._found: dict[object, _Found] = {}
        self._agreed: dict[object, _Agreed] = {}
        self._of_training: _Agreed | None = None
        self._streams: OwnStreams | None = None
        self._group: dist.ProcessGroup | None = None
        self._points: StepPoints | None = None
        self._host: HostStep | None = None
        self._left_at: Tensor | None = None
        self._said: set[str] = set()
        self.borders = PassBorders()

    def meet(self, group: dist.ProcessGroup) -> None:
        """Take the ranks of the pipeline."""
        self._group, self._streams = group, OwnStreams(self._mesh, group)

    @contextlib.contextmanager
    def of_step(
        self, microbatches: Sequence[Given], form: object, signatures: Sequence[object]
    ) -> Iterator[None]:
        """Draw for the micro-batches of one call of the model. Every rank must call this.

        Args:
            microbatches: Of this rank. Of unequal ones the draws are not one device's.
            form: What else than tensors may decide how forward runs.
            signatures: Of the tensors of each.
        """
        assert self._streams is not None
        modules = [*self._model.modules()]
        modes = tuple(module.training for module in modules)
        chances = tuple(module.p for module in modules if isinstance(module, _DROPOUTS))
        kind = (form, modes, chances, torch.is_grad_enabled())
        found = self._known(microbatches[0], (kind, signatures[0]))
        agreed = self._agreement(kind, found)
        if not agreed.draws_some and not agreed.why:
            with self._nothing():
                yield
            return
        if any(signature != signatures[0] for signature in signatures):
            found = _Found(None, "micro-batches have other shapes than the first one")
        spans = None if agreed.why else self._span(found, len(microbatches))
        if spans is None:
            why = agreed.why or found.why or "data-parallel ranks have batches of other shapes"
            with self._streams.of_call(kind, why):
                yield
            return
        assert found.draws is not None
        first, end, host_first, host_end = spans
        self._points, self._left_at = StepPoints(found.draws, first), None
        self._host = HostStep(found.draws.host or [(0, 0)], host_first)
        try:
            yield
        finally:
            self._points = self._host = None
        torch.default_generator.set_state(end.state())
        set_places(*host_end)

    @contextlib.contextmanager
    def of_pass(self, stage: int, microbatch: int) -> Iterator[None]:
        """Draw for a pass of a micro-batch, by its number among those of this rank."""
        if self._points is None or self._host is None:
            before = places()
            yield
            refuse_unseen(before, "forward")
            return
        held = torch.default_generator.get_state()
        if self._left_at is not None and not torch.equal(held, self._left_at):
            self._say("", "between forward passes, in backward for example,")
        own = self._points.entered_on(stage, self._stages_of)
        host = HostPass(self._host, microbatch)
        now = self.borders.now = StagePass(self._points, microbatch, own, self._say, host)
        try:
            yield
            now.end()
        finally:
            self.borders.now = None
        self._left_at = torch.default_generator.get_state()

    @contextlib.contextmanager
    def _nothing(self) -> Iterator[None]:
        """Run a call that draws nothing; if it does, have all ranks go on alike."""
        before = torch.default_generator.get_state()
        yield
        if not torch.equal(before, torch.default_generator.get_state()):
            torch.default_generator.set_state(before)
            self._say("")

    def _say(self, fqn: str, where: str = "") -> None:
        where = where or (f"{fqn!r}" if fqn else "forward outside of the blocks")
        if where not in self._said:
            self._said.add(where)
            warn_at_user_line(
                f"{where} drew more or fewer random numbers than when the model was run on "
                "shapes alone, to see how many: what it draws then must not depend on values or "
                "on what the program changes later. Micro-batches of this pipeline may have drawn "
                "the same numbers, and not those of one device; use pipeline_parallel.size 1"
            )

    def _known(self, given: Given, key: object) -> _Found:
        if key not in self._found:
            if len(self._found) >= _MOST_FORMS:
                del self._found[next(iter(self._found))]
            self._found[key] = self._find(given)
        return self._found[key]

    def _find(self, given: Given) -> _Found:
        if self._mesh.device_type != "cpu":
            return _Found(None, "GPUs draw dropout and attention in kernels of their own")
        whole = self._whole
        if whole is None:
            return _Found(None, f"{type(self._model).__name__} cannot be copied")
        for module, live in pairs(whole, self._model):
            module.training = live.training
            if isinstance(live, _DROPOUTS):
                vars(module)["p"] = live.p
        given = pytree.tree_map(self._cast, given)
        casts = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

        def find() -> ForwardDraws:
            with torch.autocast("cpu", casts, enabled=casts is not None):
                return draws_of_forward(whole, given, self._stages_of, self._dtype)

        try:
            return _Found(in_fresh_thread(find, of=whole))
        except UnknownDrawsError as error:
            return _Found(None, str(error))

    def _cast(self, leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(self._input_dtype) if is_float and self._input_dtype else leaf

    def _agreement(self, kind: object, found: _Found) -> _Agreed:
        if kind not in self._agreed:
            if not found.draws_some and not torch.is_grad_enabled():
                # Without a word to others: one pipeline of several may evaluate alone.
                return _Agreed(draws_some=False, why="")
            first = self._of_training if torch.is_grad_enabled() else None
            if first is not None and (first.draws_some or not found.draws_some):
                # One pipeline of several may have a batch without images, a form new to it alone.
                return first
            if first is not None and found.draws is None:
                return _Agreed(draws_some=True, why=found.why)
            assert self._group is not None
            groups = (self._group, *data_groups(self._mesh))
            ranks = gathered_objects((found.draws_some, found.why), groups)
            self._agreed[kind] = _Agreed(
                any(draws for draws, _ in ranks), next((why for _, why in ranks if why), "")
            )
            if torch.is_grad_enabled():
                self._of_training = self._agreed[kind]
        return self._agreed[kind]

    def _span(self, found: _Found, count: int) -> tuple[Point, Point, Places, Places] | None:
        """Return where this rank's micro-batches begin, and those of all end: torch's, the host's.

        Data-parallel ranks tell each other in every step how many numbers they draw: their
        batches need not be equal. None if that is no number, and they draw otherwise.
        """
        now = Point.of(torch.default_generator.get_state())
        moves: Moves = () if found.draws is None else found.draws.total
        words = count * sum(move for move in moves if isinstance(move, int))
        if not all(isinstance(move, int) for move in moves):
            words = -1
        digest = int.from_bytes(hashlib.sha256(repr((moves, count)).encode()).digest()[:6], "big")
        rank, size, ranks = self._ranks.part, self._ranks.num_parts, self._ranks.size
        host = (0, 0) if found.draws is None else found.draws.words_of_host
        told = torch.zeros(size, 5, dtype=torch.float64)
        own = [found.draws is not None, words, digest, *(count * each for each in host)]
        told[rank] = torch.tensor(own, dtype=torch.float64)
        if size > 1:
            # Ranks that share a sequence all tell the numbers of their part.
            told = self._ranks.total(told.flatten()).view(size, 5) / (ranks // size)
        known, numbers, digests, *of_host = (list(map(int, each)) for each in told.T.tolist())
        if not all(known):
            return None
        held = places()
        host_first = moved(held, [sum(each[:rank]) for each in of_host])
        host_end = moved(held, [*map(sum, of_host)])
        if min(numbers) >= 0:
            return now.after(sum(numbers[:rank])), now.after(sum(numbers)), host_first, host_end
        if len(set(digests)) > 1:
            return None
        first = repeated(now, moves, rank * count)
        return first, repeated(first, moves, (size - rank) * count), host_first, host_end

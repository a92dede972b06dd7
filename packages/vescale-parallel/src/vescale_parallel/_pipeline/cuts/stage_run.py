"""One pass of a micro-batch through a stage: what it takes, keeps and sends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import pytree

from .derived import NamesDerived
from .placeholders import Placeholder, become
from .values import Crossing, Name, Values

_CHECKPOINT = "torch.utils.checkpoint"
HOW_TO_SKIP = (
    "Where forward leaves blocks out at random (LayerDrop), stages would not know which: set its "
    "chance to 0 (layerdrop, encoder_layerdrop, decoder_layerdrop of transformers' models), or "
    "draw in the block's own forward and return the input from there. Where it leaves them out in "
    "some calls (generation, which runs an encoder once), use pipeline_parallel.size 1 for these"
)

# Returns what the stage before sent, given tensors of its shapes.
Receive = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class StageDone(BaseException):
    """Leaves the model's forward with what crosses the cut to the next stage.

    A BaseException, so that ``except Exception`` in a model does not swallow it.
    """

    def __init__(self, activations: Sequence[Tensor]) -> None:
        super().__init__()
        self.activations = activations


@dataclass(eq=False)
class StageRun:
    """The pass of one micro-batch through one stage.

    Attributes:
        stage: Index of the stage.
        first_block: Index of its first own block.
        end_block: Index after its last own block.
        is_last: Whether it is the last stage of the pipeline.
        receive: Returns what the stage before sent, given tensors of its shapes.
        takes: What that is.
        sends: What it sends itself.
        owns_outside: Whether modules outside the blocks may run on their stage.
        values: What has a name in it.
        blocks_called: Number of blocks called so far.
        around_own: Makes the context of calls of modules of this stage.
    """

    stage: int
    first_block: int
    end_block: int
    is_last: bool
    receive: Receive
    takes: Crossing = ()
    sends: Crossing = ()
    owns_outside: bool = True
    values: Values = field(default_factory=Values)
    blocks_called: int = 0
    around_own: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        names = [each for each in (*self.takes, *self.sends) if not isinstance(each, int)]
        self.values.wanted = frozenset(names)
        self._derived = NamesDerived(self.values) if self.values.has_derived else None

    @property
    def is_own(self) -> bool:
        """Whether what is called now runs on this stage."""
        if not self.owns_outside:
            return False
        return self.stage == 0 or self.blocks_called > self.first_block

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run forward within this."""
        try:
            with self._derived or contextlib.nullcontext():
                yield
        finally:
            self.values.release()

    def check_complete(self, blocks: Sequence[str]) -> None:
        """Raise if forward has returned on this stage without calling all blocks."""
        called = self.blocks_called
        if not self.is_last or called != len(blocks):
            behind = f", and not {blocks[called]!r}" if called < len(blocks) else ""
            raise ValueError(
                f"expected forward to call all {len(blocks)} blocks before it returns, as "
                f"pipeline parallelism needs, got {called}{behind}. {HOW_TO_SKIP}"
            )

    @classmethod
    def counting(cls, num_blocks: int, values: Values | None = None) -> StageRun:
        """Return a run in which modules with parameters give placeholders, to see the targets."""

        def receive(like: Sequence[Tensor]) -> Sequence[Tensor]:
            raise AssertionError("nothing is received while counting")

        values = Values() if values is None else values
        return cls(1, num_blocks, num_blocks, True, receive, owns_outside=False, values=values)

    def run_named(self, fqn: str, run: Callable[[], Any], given: Any) -> Any:
        """Run a module of this stage, and keep what later stages want of it by name."""
        name = self.values.of_call(fqn)
        if not self.values.wanted:
            with self.around_own():
                return run()
        if self._derived is not None:
            self._derived.is_paused = True
        arguments = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
        versions = [None if x.is_inference() else x._version for x in arguments]
        with self.around_own():
            output = run()
        for place, (x, before) in enumerate(zip(arguments, versions, strict=True)):
            if before is not None and x._version != before:
                self._made((*name, "argument", place), x)
        for place, x in enumerate(pytree.tree_leaves(output)):
            if isinstance(x, Tensor) and not any(x is each for each in arguments):
                self._made((*name, place), x)
        if self._derived is not None:
            self._derived.is_paused = False
        return output

    @contextlib.contextmanager
    def unnamed(self) -> Iterator[None]:
        """Give what functions compute within this no names."""
        derived = self._derived
        if derived is None:
            yield
            return
        was_paused, derived.is_paused = derived.is_paused, True
        try:
            yield
        finally:
            derived.is_paused = was_paused

    def is_named(self, tensor: Tensor) -> bool:
        """Whether a later stage may take a tensor by its name."""
        kept = self.values.tensors.values()
        is_kept = any(tensor is each for each in kept) and not isinstance(tensor, Placeholder)
        return is_kept or (self._derived is not None and self._derived.has_name(tensor))

    def _made(self, name: Name, tensor: Tensor) -> None:
        self.values.made(name, tensor)
        if self._derived is not None:
            self._derived.made(name, tensor)

    def take(self, fqn: str, leaves: Sequence[Any]) -> Sequence[Any]:
        """Let placeholders be what the stage before sent; return the arguments of a block."""
        held: list[Placeholder] = []
        for each in self.takes:
            found = self._crossing(each, leaves)
            if not isinstance(found, Placeholder):
                raise ValueError(_refusal(fqn, each, "receive"))
            held.append(found)
        if not held:
            raise ValueError(
                f"pipeline parallelism sends what a block is called with to its stage, but "
                f"{fqn!r} is called with nothing that depends on parameters of another stage"
            )
        names, given = [x.known_as for x in held], [*self.receive(held)]
        changed = [*leaves]
        for each, name, placeholder_, tensor in zip(self.takes, names, held, given, strict=True):
            result: Tensor = placeholder_
            if not become(placeholder_, tensor):
                # Something of torch's refers to it. Then the block alone has the tensor, and any
                # other use of the placeholder is refused.
                if not isinstance(each, int):
                    raise ValueError(_refusal(fqn, each, "replace"))
                _refuse_reentrant_checkpoint(fqn, tensor)
                placeholder_.stands_for = tensor
                changed = [tensor if leaf is placeholder_ else leaf for leaf in changed]
                result = tensor
            if name is not None:
                self._made(name, result)
        return changed

    def _crossing(self, each: int | Name, leaves: Sequence[Any]) -> object:
        if isinstance(each, int):
            return leaves[each] if each < len(leaves) else None
        return self.values.tensors.get(each)

    def sent(self, fqn: str, leaves: Sequence[Any]) -> Sequence[Tensor]:
        """Return what the next stage is sent, given the arguments of its first block."""
        found: list[Tensor] = []
        for each in self.sends:
            tensor = self._crossing(each, leaves)
            if not isinstance(tensor, Tensor) or isinstance(tensor, Placeholder):
                raise ValueError(_refusal(fqn, each, "send"))
            found.append(tensor)
        if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in found):
            raise ValueError(
                f"pipeline parallelism sends what {fqn!r} is called with, but what the "
                "blocks before it have computed has no floating-point tensor"
            )
        return found


def _refuse_reentrant_checkpoint(fqn: str, sent: Tensor) -> None:
    """Refuse a checkpoint around a block that would not give the stage before its gradient."""
    frame = None if torch.is_grad_enabled() or not sent.requires_grad else sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            raise ValueError(
                f"{fqn!r}, the first block of a pipeline's stage, is called by "
                "torch.utils.checkpoint with use_reentrant=True, which differentiates what it was "
                "given before the stage before has sent it, and would lose its gradient; pass "
                "use_reentrant=False, or have the plan say recompute='full'"
            )
        frame = frame.f_back


def _refusal(fqn: str, each: int | Name, what: str) -> str:
    told = f"argument {each}" if isinstance(each, int) else f"what {_told(each)} computes"
    return (
        f"pipeline parallelism cannot {what} {told}, which was seen to cross the cut before "
        f"{fqn!r}: forward does something else than in its first call of this form, or code "
        "keeps views of it. Hand it from block to block as an argument, or split elsewhere "
        "(pipeline_parallel.split_points)"
    )


def _told(name: Name) -> str:
    kind, called, *_ = name
    return repr(called) if kind == "module" else f"a call of {called}"

"""What did a program do to distributed tensors, line by line? For people, and for tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor._comm.events import Communication, listening
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.dtensor import DTensor, layout_of
from vescale_dtensor._tensor.events import Redistribution, redistributions_told
from vescale_dtensor._torch_private import OpOverload, pytree

_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Operation:
    """One operator on distributed tensors.

    Attributes:
        name: Of the operator.
        source: File and line of the user's program that led to it; of the call of
            ``backward`` for operators of the backward pass.
        module: Name of the module whose forward was running; empty outside of any.
        inputs: Layouts of its distributed tensors.
        outputs: Layouts of its results.
        local_shapes: Shapes of the results on this rank.
        moves: Tensors that were redistributed for it.
        collectives: What was communicated.
    """

    name: str
    source: str
    module: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    local_shapes: tuple[tuple[int, ...], ...]
    moves: tuple[Redistribution, ...]
    collectives: tuple[Communication, ...]

    @property
    def nbytes(self) -> int:
        """Bytes this rank sent for it."""
        return sum(each.nbytes for each in self.collectives)

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.name} {_list(self.inputs)} -> {_list(self.outputs)}"]
        lines[0] += f", here {', '.join(map(str, self.local_shapes)) or '-'}"
        lines += [f"    moved {move}" for move in self.moves]
        if self.collectives:
            lines.append(f"    {len(self.collectives)} collectives, {self.nbytes} bytes sent")
        return "\n".join(lines)


@dataclass
class Explanation:
    """The operators that ran inside :func:`explain`, in order."""

    operations: list[Operation] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes this rank sent."""
        return sum(operation.nbytes for operation in self.operations)

    def by_module(self) -> dict[str, tuple[int, int, int]]:
        """Return operators, collectives and bytes sent of each module and those inside it."""
        totals: dict[str, tuple[int, int, int]] = {}
        for operation in self.operations:
            parts = operation.module.split(".") if operation.module else []
            for depth in range(len(parts) + 1):
                name = ".".join(parts[:depth])
                ran, sent, nbytes = totals.get(name, (0, 0, 0))
                sent += len(operation.collectives)
                totals[name] = (ran + 1, sent, nbytes + operation.nbytes)
        return totals

    def __str__(self) -> str:
        lines = [str(operation) for operation in self.operations]
        lines += ["", f"{'module':40} {'operators':>9} {'collectives':>11} {'bytes sent':>12}"]
        for name, (ran, sent, nbytes) in self.by_module().items():
            lines.append(f"{name or '(all)':40} {ran:9} {sent:11} {nbytes:12}")
        return "\n".join(lines)


@contextmanager
def explain(model: nn.Module | None = None) -> Iterator[Explanation]:
    """Record every operator on distributed tensors inside: where, how laid out, what moved.

    Args:
        model: Whose module names to use; without it operators belong to no module.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Shard
        >>> from vescale_dtensor import distribute_tensor, emulate, explain
        >>> with emulate(2), explain() as explanation:
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.ones(4, 4), mesh, (Shard(0),))
        ...     y = (x @ x).relu()
        >>> for each in explanation.operations:
        ...     print(each.name, each.nbytes)
        aten.mm.default 32
        aten.relu.default 0
    """
    explanation = Explanation()
    inside: list[str] = []
    run = DTensor.rules

    def explained(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        collectives: list[Communication] = []
        moves: list[Redistribution] = []
        # A decomposition calls other operators; they are parts of this one.
        DTensor.rules = staticmethod(run)
        try:
            with listening(collectives.append), redistributions_told(moves.append):
                result = run(func, args, kwargs)
        finally:
            DTensor.rules = staticmethod(explained)
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, DTensor)]
        explanation.operations.append(
            Operation(
                str(func),
                _source(),
                inside[-1] if inside else "",
                _layouts((args, kwargs)),
                _layouts(result),
                tuple(tuple(t._local_tensor.shape) for t in results),
                tuple(moves),
                tuple(collectives),
            )
        )
        return result

    with ExitStack() as stack:
        if model is not None:
            _follow_modules(model, inside, stack)
        DTensor.rules = staticmethod(explained)
        try:
            yield explanation
        finally:
            DTensor.rules = staticmethod(run)


def _follow_modules(model: nn.Module, inside: list[str], stack: ExitStack) -> None:
    """Keep the name of the module whose forward is running at the end of ``inside``."""
    for name, module in model.named_modules():

        def enter(_: nn.Module, __: Any, name: str = name) -> None:
            inside.append(name)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            inside.pop()

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)


def _layouts(tree: Any) -> tuple[Layout, ...]:
    return tuple(
        layout_of(leaf)
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor) and isinstance(leaf, DTensor)
    )


def _source() -> str:
    """Return the innermost line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_OWN, _TORCH)):
            return f"{Path(filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _list(layouts: tuple[Layout, ...]) -> str:
    return ", ".join(str(each) for each in layouts) or "-"

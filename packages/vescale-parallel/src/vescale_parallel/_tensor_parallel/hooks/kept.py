"""What forward keeps in attributes, for programs that read it: whole, where ranks have parts.

Forward of the next call finds there what it has left, a rank's part. In between programs read it,
maps of attention to show or to train, and would take the part for all of it. They find a DTensor,
as of logits: nothing is sent before they read it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale_dtensor import DTensor
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._tensor_parallel.communicators import Ranks
from vescale_parallel._torch_private import pytree

from .axis import is_plain
from .whole_activations import FindsLayouts, KeptLayouts, Layout, to_whole


class FindsKept(Protocol):
    """Knows how what forward keeps lies over ranks."""

    def kept(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> KeptLayouts | None:
        """Return it for a call of a model, of what is not whole; None if it is not known."""
        ...


class FindsParts(FindsLayouts, FindsKept, Protocol):
    """Knows both, of what hooks are given and of what forward keeps."""


class KeptByForward:
    """Shows programs what forward kept, between the calls of a model.

    Args:
        model: The model, which is sharded.
        mesh: Of the tensor-parallel ranks.
        ranks: The same ranks.
        finds: Knows how what is kept lies over them.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, ranks: Ranks, finds: FindsKept) -> None:
        self._mesh, self._ranks, self._finds = mesh, ranks, finds
        self._attributes = {fqn: vars(module) for fqn, module in model.named_modules()}
        self._before = {id(x): x for _, _, x in self._tensors()}
        self._shown: list[tuple[dict[str, Any], str, weakref.ref[Tensor]]] = []
        self._told: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def proven(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Run a call inside, which finds what the one before kept."""
        for attributes, name, shown in self._shown:
            held = attributes.get(name)
            if held is not None and held is shown():
                attributes[name] = held._vescale_part
        self._shown.clear()
        yield
        kept = [(fqn, name) for fqn, name, x in self._tensors() if id(x) not in self._before]
        if not kept:
            return
        layouts = self._finds.kept(model, args, kwargs)
        for place in dict.fromkeys(kept):
            layout = None if layouts is None else layouts.get(place, _WHOLE)
            if layout is None:
                self._tell(*place)
            elif not layout.is_whole:
                self._show(self._attributes[place[0]], place[1], layout)

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield what attributes hold, as tensors or in containers: a look in every call."""
        for fqn, attributes in self._attributes.items():
            for name, value in attributes.items():
                if isinstance(value, Tensor):
                    held = [value]
                elif type(value) in _CONTAINERS and value and name not in _OF_TORCH:
                    held = pytree.tree_leaves(value)
                else:
                    continue
                yield from ((fqn, name, x) for x in held if is_plain(x) and x.is_floating_point())

    def _show(self, attributes: dict[str, Any], name: str, layout: Layout) -> None:
        part: Tensor = attributes[name]
        shown: Any
        if layout.value == Replicate():
            shown = to_whole(part, layout, self._ranks)
        else:
            shown = DTensor.from_local(part, self._mesh, (layout.value,))
        # With it: a program that drops what is kept lets go of both.
        shown._vescale_part = part
        attributes[name] = shown
        self._shown.append((attributes, name, weakref.ref(shown)))

    def _tell(self, fqn: str, name: str) -> None:
        if (fqn, name) not in self._told:
            self._told.add((fqn, name))
            warn_at_user_line(
                f"{fqn!r} keeps {name!r}, of which a tensor-parallel rank may have a part, and "
                "how it lies over ranks could not be found: a program that reads it between calls "
                "reads this rank's. Keep one tensor in an attribute, or have a module return it"
            )


_WHOLE = Layout(Replicate(), Replicate())
_CONTAINERS = {list, dict, tuple}
_OF_TORCH = frozenset(vars(nn.Module()))

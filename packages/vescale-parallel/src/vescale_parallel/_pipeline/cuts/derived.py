"""Names of what code between modules computes, on the stage that has the tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_parallel._model.shape_questions import SHAPE_QUESTIONS
from vescale_parallel._torch_private import pytree

from .values import Name, Values, versions_of, without_shape_questions, writes


class NamesDerived(TorchFunctionMode):
    """Keeps the results of functions that a later stage wants, as placeholders name them there.

    See [Note: names of values]. It costs time in every function, and runs where code between
    modules computes what is needed far behind.

    Attributes:
        values: Of the run of forward.
        is_paused: Whether a module is running, whose functions have no names.
    """

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values
        self.is_paused = False
        # With the tensors, so that no other one gets the id of one.
        self._names: dict[int, tuple[Tensor, Name]] = {}

    def made(self, name: Name, tensor: Tensor) -> None:
        """Note the name of a tensor."""
        self._names[id(tensor)] = (tensor, name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if self.is_paused or func in SHAPE_QUESTIONS:
            return func(*args, **given)
        leaves = pytree.tree_leaves((without_shape_questions(func, args, self.has_name), given))
        held = [leaf for leaf in leaves if self.has_name(leaf)]
        if not held:
            return func(*args, **given)
        versions = [*versions_of(leaves)]
        names = [self._names[id(leaf)][1] for leaf in held]
        result = func(*args, **given)
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        new = [leaf for leaf in found if not any(leaf is each for each in held)]
        if writes(func) and self.has_name(args[0]):
            new = [args[0]]
        else:
            new += [
                leaf
                for leaf, before in versions
                if leaf._version != before and not self.has_name(leaf)
            ]
        call = self.values.of_function(func, names)
        for place, each in enumerate(new):
            self.made((*call, place), each)
            self.values.made((*call, place), each)
        return result

    def has_name(self, leaf: object) -> bool:
        """Whether something is a tensor with a name."""
        return isinstance(leaf, Tensor) and id(leaf) in self._names

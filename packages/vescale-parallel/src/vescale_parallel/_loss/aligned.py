"""What a model returned for micro-batches, leaf by leaf, where some returned less than others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vescale_parallel._model.leaf_names import leaf_names
from vescale_parallel._torch_private import pytree


@dataclass(frozen=True)
class Aligned:
    """The outputs of micro-batches: a part without images has no features of them, say.

    Attributes:
        fullest: The last of those that have most.
        names: Of its leaves.
        columns: Of each of these, the leaves of the outputs that have it, by their number.
    """

    fullest: Any
    names: Sequence[str]
    columns: Sequence[dict[int, Any]]

    @staticmethod
    def of(outputs: Sequence[Any]) -> Aligned:
        """Return outputs of one call.

        Raises:
            ValueError: If one has what the fullest one has not.
        """
        named = [dict(zip(leaf_names(x), pytree.tree_leaves(x), strict=True)) for x in outputs]
        last = max(range(len(named)), key=lambda index: (len(named[index]), index))
        for other in named:
            if missing := other.keys() - named[last].keys():
                raise ValueError(
                    f"micro-batches returned different structures, of which one has {missing}; "
                    "evaluate in one micro-batch, or return the same of all rows"
                )
        names = [*named[last]]
        columns = [{i: x[name] for i, x in enumerate(named) if name in x} for name in names]
        return Aligned(outputs[last], names, columns)

    def of_all(self, index: int, num_outputs: int) -> list[Any]:
        """Return a leaf of every output.

        Raises:
            ValueError: If one does not have it.
        """
        column = self.columns[index]
        if len(column) < num_outputs:
            raise ValueError(
                f"forward returned a number, output{self.names[index]}, for some micro-batches "
                "and not for others; it is no mean over rows. Return it always"
            )
        return [*column.values()]

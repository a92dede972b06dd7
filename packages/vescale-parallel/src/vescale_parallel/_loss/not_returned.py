"""What a call has in the place of a tensor that it did not return."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

from vescale_parallel._torch_private import pytree

Where = Literal["last", "nowhere", "in parts", "in slices", "as a mean"]
_WHY: dict[Where, str] = {
    "last": (
        "is on the last stage's ranks only, as pipeline_parallel.outputs 'last' asks; 'broadcast' "
        "gives it to all ranks"
    ),
    "nowhere": (
        "was not kept: a step of a pipeline that is differentiated returns its scalars. Set "
        "pipeline_parallel.outputs to 'last' for the ranks of the last stage, or to 'broadcast' "
        "for all ranks, or call the model under torch.no_grad()"
    ),
    "in parts": (
        "was not kept: batch.gradient_accumulation returns scalars of a step that is "
        "differentiated. Call the model under torch.no_grad(), or accumulate in the loop"
    ),
    "as a mean": (
        "is not the mean of what micro-batches of a pipeline give, as exponentials, roots, sums "
        "and maxima are not. Compute it in the loop, from the loss for example, or, with "
        "data_parallel.size 1, call the model under torch.no_grad()"
    ),
    "in slices": (
        "was not gathered: of a call that is differentiated each rank that shares the sequence "
        "has a slice of it. Set context_parallel.outputs to 'whole', or call the model under "
        "torch.no_grad()"
    ),
}


class NotReturned:
    """Raises when it is used as the tensor in whose place it is.

    It is no tensor, so that code that looks for tensors in an output passes it by.
    """

    __slots__ = ("_vescale_place",)

    def __init__(self, name: str, where: Where) -> None:
        self._vescale_place: tuple[str, Where] = (name, where)

    def __repr__(self) -> str:
        name, where = self._vescale_place
        return f"NotReturned({name!r}, {where!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return NotReturned, self._vescale_place

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # of protocols, which ask whether there is one
            raise AttributeError(attribute)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, NotReturned)]
        (found or [cls("leaf", "nowhere")])[0]._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        name, where = self._vescale_place
        raise ValueError(f"the tensor {name} of the model's output {_WHY[where]}")

    __getitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __pow__ = _refuse
    __eq__ = __ne__ = _refuse  # pyright: ignore[reportAssignmentType]: no bool comes of it
    __hash__ = object.__hash__

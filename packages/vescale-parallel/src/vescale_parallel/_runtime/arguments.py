"""What a call is given: a batch by name, and what to say if forward cannot take it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vescale_parallel._model.inputs import binds
from vescale_parallel._model.leaf_names import leaf_names
from vescale_parallel._model.structures import open_mappings, open_objects
from vescale_parallel._torch_private import pytree


class Arguments:
    """The arguments of calls of one model.

    [Note: a batch by name] Loaders and tokenizers give a dict, and ``forward`` often takes its
    values by name. So ``model(batch)`` with nothing but a mapping means ``model(**batch)``, if
    forward takes several things and all that are in the mapping. A forward of one parameter takes
    the mapping itself, as on one device.

    Args:
        model: Not parallelized yet.
        device_type: Where its parameters will be.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._signature = inspect.signature(model.forward)
        parameters = self._signature.parameters.values()
        kinds = {p.kind for p in parameters}
        self._names = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        self._takes_one = len(self._names) == 1 and len(self._signature.parameters) == 1
        self._takes_any_name = kinds == {inspect.Parameter.VAR_KEYWORD}
        self._device_type = device_type

    def by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments, those in a lone mapping by name."""
        open_mappings((*args, *kwargs.values()))
        open_objects((args, kwargs))
        if len(args) != 1 or kwargs or not isinstance(args[0], Mapping) or self._takes_one:
            return args, kwargs
        batch: Mapping[Any, Any] = args[0]
        if not all(isinstance(name, str) for name in batch):
            return args, kwargs
        if not self._takes_any_name and (batch.keys().isdisjoint(self._names)):
            return args, kwargs
        named: dict[str, Any] = {**batch}
        return ((), named) if binds(self._signature, (), named) else (args, kwargs)

    def refuse_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any], by: str) -> None:
        """Raise for a tensor whose gradient is wanted, of a call that is differentiated inside.

        ``by`` is who does that.
        """
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        for name, value in named.items():
            for where, leaf in zip(leaf_names(value), pytree.tree_leaves(value), strict=True):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    raise ValueError(
                        f"{name}{where} requires a gradient, as for a penalty on "
                        f"gradients, an attack, or what another module computed; but {by} "
                        "differentiates micro-batches within the call and gives inputs no "
                        "gradients. Detach it, have the model's forward compute what needs its "
                        "gradient, or use pipeline_parallel.size 1 and "
                        "batch.gradient_accumulation 1"
                    )

    def explain(self, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> None:
        """Raise what is wrong with the arguments, if that may be why a call of them failed.

        Raises:
            TypeError: If there are values where tensors are expected, or unknown names.
            RuntimeError: If tensors are on another device than the model.
        """
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if isinstance(error, TypeError | AttributeError):
            if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
                self._explain_mapping(args[0], error)
            for name, value in named.items():
                if _is_numbers(value):
                    raise TypeError(
                        f"expected tensors, got {_kind(value)} for {name!r} ({error}); make it a "
                        "tensor, torch.as_tensor(..); tokenizers do so with return_tensors='pt'"
                    ) from error
        for name, value in named.items():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.device.type != self._device_type:
                    raise RuntimeError(
                        f"expected arguments on {self._device_type!r}, where parallelize put the "
                        f"model, got {name!r} on {str(leaf.device)!r} ({error}); move the batch: "
                        f"batch.to({self._device_type!r})"
                    ) from error

    def _explain_mapping(self, batch: Mapping[Any, Any], error: Exception) -> None:
        unknown = [name for name in batch if name not in self._names]
        if self._takes_one or len(unknown) == len(batch):
            return
        if unknown:
            what = f"got a dict that has {unknown[0]!r} besides; leave it out of the batch"
        else:
            what = f"got a dict of {list(batch)} alone ({error}); add what is missing"
        raise TypeError(
            f"expected a batch of what forward takes ({', '.join(self._names)}), {what}"
        ) from error


def _is_numbers(value: object) -> bool:
    """Whether a value is a list of numbers, or an array of another library."""
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        return True
    inner = value
    while isinstance(inner, list | tuple) and inner:
        inner = inner[0]  # pyright: ignore[reportUnknownVariableType]: of any kind
    return inner is not value and isinstance(inner, int | float) and not isinstance(inner, bool)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" + (" of numbers" if isinstance(value, list) else "")

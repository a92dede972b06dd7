"""Stop at the first module that computes NaN or infinity, forward or backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import DTensor

from ._torch_private import FakeTensor, is_in_backward, pytree

_READERS = "vescale: modules that read it"  # in the metadata of a node of autograd


@contextmanager
def detect_nonfinite(model: nn.Module, *, infinities: bool = True) -> Iterator[None]:
    """Raise where a module first returns NaN or infinity, or its backward pass gives one.

    Of modules within each other the innermost is named, with this rank, whether its inputs were
    finite, and its parameters that are not. The other ranks are told as of any error; see
    :class:`PeerError`. Every output of every module is looked at, which waits for the device each
    time: run the step again that went wrong, from a checkpoint before it. No number changes.

    Args:
        model: Any model, parallelized or not.
        infinities: Whether infinities count; without them only NaN does, for models that mask by
            infinite scores.

    Raises:
        FloatingPointError: In the call of the model, or in ``backward()``.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with torch.no_grad(), detect_nonfinite(model):
        ...     _ = model[0].bias.fill_(float("nan"))
        ...     model(torch.ones(1, 2))
        Traceback (most recent call last):
        FloatingPointError: '0' (Linear) returned 2 NaN of 2 elements on rank 0; its inputs were \
finite; of its parameters bias was not
    """
    watch = _Watch(infinities)
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def check(own: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                watch.check(name, own, (args, kwargs), out)

            stack.callback(module.register_forward_hook(check, with_kwargs=True).remove)
        stack.callback(watch.end)
        yield


class _Watch:
    """Looks at what modules return and at gradients, until it ends."""

    def __init__(self, infinities: bool) -> None:
        self._infinities, self._is_open = infinities, True

    def end(self) -> None:
        """Look at no more gradients: graphs may be there still."""
        self._is_open = False

    def check(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Raise if a module returned what is not finite; watch the gradients of its inputs."""
        found = self._first(_floats(output))
        if found:
            before = self._first(_floats(inputs))
            said = f"among its inputs were {before}" if before else "its inputs were finite"
            bad = [each for each, p in module.named_parameters() if self._first([p.detach()])]
            said += f"; of its parameters {', '.join(bad)} was not" if bad else ""
            raise FloatingPointError(
                f"{_called(name, module)} returned {found} on {_rank()}; {said}"
            )
        if is_in_backward():
            return  # run again: its gradients are looked at already
        for node in {x.grad_fn for x in _floats(inputs) if x.grad_fn is not None}:
            # The gradient of a tensor is whole before its node runs: that of all of its readers.
            metadata: Any = node.metadata  # a dict, which torch types as a method
            readers: dict[str, str] = metadata.setdefault(_READERS, {})
            if not readers:
                node.register_prehook(functools.partial(self._backward, readers))
            # Of modules within each other the innermost left first.
            if not any(f"{each}.".startswith(f"{name}." if name else "") for each in readers):
                readers[name] = _called(name, module)

    def _backward(self, readers: Mapping[str, str], grads: Iterable[Tensor | None]) -> None:
        found = self._first([g for g in grads if g is not None]) if self._is_open else ""
        if found:
            modules = " or ".join(readers.values())
            raise FloatingPointError(
                f"backward of {modules} gave {found} as the gradient of its input, on {_rank()}"
            )

    def _first(self, tensors: Iterable[Tensor]) -> str:
        """Return how many elements of the first such tensor are not finite; empty for none."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            nans, infinite = int(local.isnan().sum()), int(local.isinf().sum())
            if nans:
                return f"{nans:,} NaN of {local.numel():,} elements"
            if infinite and self._infinities:
                return f"{infinite:,} infinities of {local.numel():,} elements"
        return ""


def _called(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'!r} ({type(module).__name__})"


def _rank() -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else 0}"


def _floats(tree: Any) -> list[Tensor]:
    """Return the real floating-point tensors of a tree, without their graph's modes."""
    return [
        leaf
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor)
        and leaf.is_floating_point()
        and not leaf.is_meta
        and not isinstance(leaf, FakeTensor)
    ]

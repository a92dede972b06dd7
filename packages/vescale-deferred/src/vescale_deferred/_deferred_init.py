"""Construct a module of any size without its tensors."""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vescale_dtensor import package_logger

from ._module_tensors import registered, replace_unregistered
from ._recording.eager_scopes import EagerScopes, reason_of
from ._recording.mode import ConstructionMode
from ._tape.deferred_tensor import DeferredTensor
from ._torch_private import active_modes, plainly
from .exceptions import DeferredWarning

M = TypeVar("M", bound=nn.Module)
_log = package_logger("vescale.deferred")
# Constants and small tables are not what a module is deferred for.
_MAX_SILENT_NBYTES = 1 << 20


def deferred_init(module_or_factory: M | Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """Construct a module whose tensors have no memory yet.

    Nothing is drawn either, but torch's generators are left as ordinary construction would have
    left them. The tensors of the module know shape, dtype, device and ``requires_grad``;
    :func:`materialize` and :func:`read` give them exactly the values of ordinary construction.

    Where something cannot be deferred, the function or constructor that does it makes real
    tensors, with a :class:`DeferredWarning` that says why; the rest stays deferred. That is found
    out by trying, so the constructor then runs several times. Values that are read from a file or
    an array are real as well, with a warning if they take more than a megabyte.

    Args:
        module_or_factory: A module class or any callable that returns a module; or a module,
            which is real already and returned as it is.
        *args: Passed to the constructor.
        **kwargs: Passed to the constructor.

    Raises:
        TypeError: If ``module_or_factory`` is neither, or returns no module, or is a module and
            arguments are given.

    Example:
        >>> layer = deferred_init(nn.Linear, 4, 3)
        >>> layer.weight
        deferred Parameter(shape=(3, 4), dtype=torch.float32, device='cpu', \
requires_grad=True, fqn='weight')
    """
    if isinstance(module_or_factory, nn.Module):
        if args or kwargs:
            raise TypeError(
                f"expected a module class or a function with these arguments, got a "
                f"{type(module_or_factory).__name__} that is constructed already"
            )
        return cast(M, module_or_factory)
    if not callable(module_or_factory):
        raise TypeError(
            "expected a module, a module class or a function that returns a module, got "
            f"{module_or_factory!r}"
        )
    if any(isinstance(mode, ConstructionMode) for mode in active_modes()):
        return module_or_factory(*args, **kwargs)  # a part of what is being deferred already
    module, construction = _construct(module_or_factory, args, kwargs)
    if construction is None:
        return module
    with plainly():
        construction.generators.settle()
    if not isinstance(cast(object, module), nn.Module):
        raise TypeError(
            f"expected {_name(module_or_factory)} to return a torch.nn.Module, got {module!r}"
        )
    _name_tensors(module)
    with plainly():
        replace_unregistered(module, construction.generators.real_state)
    _tell_what_is_real(module)
    if _log.isEnabledFor(logging.INFO):
        nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
        _log.info("constructed %s without its %d bytes", type(module).__name__, nbytes)
    return module


def is_deferred(tensor_or_module: Tensor | nn.Module) -> bool:
    """Say whether a tensor, or any tensor of a module, has no values yet.

    Example:
        >>> is_deferred(deferred_init(nn.Linear, 4, 3)), is_deferred(nn.Linear(4, 3))
        (True, False)
    """
    if isinstance(tensor_or_module, nn.Module):
        found = any(isinstance(t, DeferredTensor) for *_, t in registered(tensor_or_module))

        def look(tensor: Tensor) -> Tensor:
            nonlocal found
            found = found or isinstance(tensor, DeferredTensor)
            return tensor

        replace_unregistered(tensor_or_module, look)
        return found
    return isinstance(tensor_or_module, DeferredTensor)


def _construct(
    factory: Callable[..., M], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[M, ConstructionMode | None]:
    """Return a module and what recorded it: as much as can be, None if nothing."""
    eager_scopes = EagerScopes(_attempt.__code__)
    others = _OtherGenerators()
    refusal = None
    while refusal is None:
        construction = ConstructionMode(eager_scopes)
        try:
            module = _attempt(construction, factory, args, kwargs)
        except Exception as error:
            others.rewind()
            _log.debug("constructing %s again, after %r", _name(factory), error)
            refusal = None if eager_scopes.learn(error) else reason_of(error)
        else:
            for name, reason in eager_scopes.reasons.items():
                _warn(name, reason)
            return module, construction
    module = factory(*args, **kwargs)
    _warn(_name(factory), refusal)
    return module, None


def _attempt(
    construction: ConstructionMode,
    factory: Callable[..., M],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> M:
    """Record a construction; if it fails, torch's generators are where they were."""
    try:
        with construction:
            return factory(*args, **kwargs)
    except BaseException:
        construction.generators.rewind()
        raise


def _warn(name: str, reason: str) -> None:
    warnings.warn(
        f"{name} was constructed for real, it could not be deferred: {reason}",
        DeferredWarning,
        stacklevel=4,
    )


class _OtherGenerators:
    """The generators of Python and NumPy, for a second try."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = sys.modules.get("numpy.random")
        self._numpy_state = None if self._numpy is None else self._numpy.get_state()

    def rewind(self) -> None:
        """Put them back to where they were."""
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.set_state(self._numpy_state)


def _name_tensors(module: nn.Module) -> None:
    for fqn, _, _, tensor in registered(module):
        if isinstance(tensor, DeferredTensor):
            tensor.deferral.fqn = tensor.deferral.fqn or fqn
            tensor.deferral.tape.fqn = tensor.deferral.tape.fqn or fqn


def _tell_what_is_real(module: nn.Module) -> None:
    real: dict[Tensor, str] = {}
    for fqn, _, _, tensor in registered(module):
        if not (isinstance(tensor, DeferredTensor) or tensor.is_meta or is_lazy(tensor)):
            real.setdefault(tensor, fqn)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in real)
    if nbytes > _MAX_SILENT_NBYTES:
        warnings.warn(
            f"{len(real)} tensors of {type(module).__name__} have memory, {nbytes} bytes, the "
            f"first is {next(iter(real.values()))!r}: values that are read from a file or an "
            "array, or made where nothing could be deferred, are real. Instead of "
            "from_pretrained construct the model from its config, say skip_init(model), and "
            "load the checkpoint into it",
            DeferredWarning,
            stacklevel=3,
        )


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__qualname__", repr(factory))

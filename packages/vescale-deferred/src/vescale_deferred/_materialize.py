"""Give deferred tensors their values: all of them, or the part a rank owns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import mul
from typing import Protocol, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vescale_dtensor import Box
from vescale_dtensor.random import Window

from ._evaluation.partial_replay import replay_part
from ._evaluation.replay import replay
from ._module_tensors import registered, replace_unregistered
from ._tape.deferred_tensor import DeferredTensor, copy_attributes
from .exceptions import DeferredError

M = TypeVar("M", bound=nn.Module)


class ShardMaker(Protocol):
    """Decides what takes the place of a parameter or buffer."""

    def __call__(self, fqn: str, tensor: Tensor, read: Callable[[Box | None], Tensor]) -> Tensor:
        """Return what to put in the place of ``tensor``.

        Args:
            fqn: Its first name in the module.
            tensor: The deferred tensor, for its shape and dtype; or a real one.
            read: Returns the values in a box of it, or all with None; see :func:`read`.
        """
        ...


def read(tensor: Tensor, box: Box | None = None) -> Tensor:
    """Return the values of a deferred tensor, as ordinary construction would have made them.

    Bitwise what ordinary construction under the same seed gives, whatever else is read before,
    after or never. Neither the tensor nor a generator changes. A real tensor is copied.

    Args:
        tensor: Usually a parameter or buffer of a deferred module.
        box: The part to return; all of it if None.

    Returns:
        A plain tensor in memory of its own.

    Raises:
        ValueError: If ``box`` does not lie within ``tensor``.

    Example:
        >>> from vescale_deferred import deferred_init
        >>> layer = deferred_init(nn.Linear, 4, 3)
        >>> read(layer.weight, Box(offset=(1, 0), shape=(1, 4))).shape
        torch.Size([1, 4])
    """
    if box is not None:
        _check(box, tensor)
    if not isinstance(tensor, DeferredTensor):
        part = tensor.detach() if box is None else tensor.detach()[box.slices]
        return part.clone()
    snapshot = tensor.deferral.snapshot()
    if box is None or box.shape == snapshot.window.shape:
        whole = replay([snapshot])[0]
        # A view of something larger does not keep all of it.
        return whole if snapshot.window.covers(snapshot.tape.nbytes) else whole.clone()
    return replay_part(replace(snapshot, window=_window(snapshot.window, box)))


def materialize(module: M, *, make: ShardMaker | None = None) -> M:
    """Replace the deferred tensors of ``module`` by real ones, in place.

    Tensors that were one object stay one object, and without ``make`` tensors that shared memory
    share memory. Tensors in plain attributes of the module are made whole, also in lists, dicts
    and other objects there, but for modules that are not registered: materialise these, too.

    Args:
        module: Deferred, or partly so.
        make: Called once for every parameter and buffer, deferred or not, and tells what to put
            there; a parameter becomes one again. None makes everything whole.

    Returns:
        ``module``.

    Example:
        >>> from vescale_deferred import deferred_init
        >>> materialize(deferred_init(nn.Linear, 4, 3)).weight.shape
        torch.Size([3, 4])
    """
    replacements = _Replacements(module, make)
    for fqn, holder, name, tensor in list(registered(module)):
        holder[name] = replacements.registered(fqn, tensor)
    replace_unregistered(module, replacements.unregistered)
    if make is None:
        for each in module.modules():
            if isinstance(each, nn.RNNBase):
                each.flatten_parameters()
    return module


class _Replacements:
    """What takes the place of each tensor of one module; the same for the same tensor."""

    def __init__(self, module: nn.Module, make: ShardMaker | None) -> None:
        self._make = make
        # The originals are kept so that no id is used twice.
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        if make is None:
            _fill_storages([tensor for *_, tensor in registered(module)])

    def registered(self, fqn: str, tensor: Tensor) -> Tensor:
        """Return what takes the place of a parameter or buffer."""
        if is_lazy(tensor):  # torch has not given it a shape yet
            return tensor
        is_deferred = isinstance(tensor, DeferredTensor)
        if is_deferred and tensor.deferral.made is not None:
            return tensor.deferral.made
        if id(tensor) not in self._made:
            if self._make is not None:
                value = _like(tensor, self._make(fqn, tensor, partial(read, tensor)))
            else:
                value = _whole(tensor) if is_deferred else tensor
            self._made[id(tensor)] = tensor, value
            if is_deferred and value is not tensor:
                tensor.deferral.made = value
                self._make_gradient(fqn, tensor, value)
        return self._made[id(tensor)][1]

    def _make_gradient(self, fqn: str, tensor: Tensor, value: Tensor) -> None:
        """Give ``value`` the gradient that the constructor left behind."""
        if tensor.grad is None:
            return
        if self._make is not None:
            raise DeferredError(
                f"{fqn!r} has a gradient from its constructor, of which no shard can be made; "
                "call module.zero_grad() before materialize(module, make=...)"
            )
        grad = tensor.grad
        value.grad = _whole(grad) if isinstance(grad, DeferredTensor) else grad

    def unregistered(self, tensor: Tensor) -> Tensor:
        """Return what takes the place of a tensor in an attribute."""
        if id(tensor) in self._made:
            return self._made[id(tensor)][1]
        if not isinstance(tensor, DeferredTensor):
            return tensor
        if tensor.deferral.made is None:
            tensor.deferral.made = _whole(tensor)
        return tensor.deferral.made


def _fill_storages(tensors: list[Tensor]) -> None:
    """Make the storages of all deferred ``tensors`` in one go, in the order of recording."""
    snapshots = [
        tensor.deferral.snapshot()
        for tensor in tensors
        if isinstance(tensor, DeferredTensor) and tensor.deferral.tape.storage is None
    ]
    for snapshot, tensor in zip(snapshots, replay(snapshots), strict=True):
        snapshot.tape.storage = tensor.untyped_storage()


def _whole(tensor: DeferredTensor) -> Tensor:
    """Return ``tensor`` with values, on the storage of its tape."""
    _fill_storages([tensor])
    snapshot = tensor.deferral.snapshot()
    assert snapshot.tape.storage is not None
    return _like(tensor, snapshot.window.on(snapshot.tape.storage))


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` as a parameter if ``tensor`` is one, with its Python attributes."""
    if value is tensor:
        return value
    if not isinstance(tensor, nn.Parameter):
        value.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    elif not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    # Other subclasses keep what they are made of in attributes.
    if type(tensor) in (DeferredTensor, Tensor, nn.Parameter):
        copy_attributes(tensor, value)
    return value


def _window(window: Window, box: Box) -> Window:
    offset = window.offset + sum(map(mul, box.offset, window.stride))
    return Window(box.shape, window.stride, offset, window.dtype)


def _check(box: Box, tensor: Tensor) -> None:
    ends = [low + size for low, size in zip(box.offset, box.shape, strict=False)]
    fits = len(box.offset) == len(box.shape) == tensor.dim() and all(
        0 <= low <= end <= size
        for low, end, size in zip(box.offset, ends, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"expected a box within a tensor of shape {tuple(tensor.shape)}, got {box!r}"
        )

"""What modules keep from call to call, left as it is by a call that is made once more."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

_REGISTERED = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def kept_aside(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules write to copies of their buffers and attributes, which are gone at the end.

    Copied are tensors, and lists, dicts, sets and deques with what is in them.
    """
    held = [(module, {**module._buffers}, {**vars(module)}) for module in modules]
    try:
        for module, buffers, attributes in held:
            module._buffers.update({name: _copied(value) for name, value in buffers.items()})
            names = (name for name in attributes if name not in _REGISTERED)
            vars(module).update({name: _copied(attributes[name]) for name in names})
        yield
    finally:
        for module, buffers, attributes in held:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _copied(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is list:
        return [*map(_copied, value)]
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    if type(value) is deque:
        return deque(map(_copied, value), value.maxlen)
    return value.copy() if type(value) is set else value

"""The only uses of torch's private names in this package.

Each was seen in torch 2.11 to 2.15; a version that lacks one fails here, at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Tensors with shapes and no memory; without them a model could only be observed by running it.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable

# The nested structures that modules take and return; torch has no public name for it.
from torch.utils import _pytree as pytree

# Documented, though its module has an underscore.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "call_after_backward", "pytree"]


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass in progress has ended.

    FSDP2 does the same; without it gradients could not be summed after the last one.
    """
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)

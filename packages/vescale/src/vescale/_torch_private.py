"""The only uses of torch's private names in this package.

Each was seen in torch 2.11 to 2.15; a version that lacks one fails here, at import.
"""

from __future__ import annotations

import torch

# Tensors with shapes and no memory; hooks see them where a model is run without being computed.
from torch._subclasses.fake_tensor import FakeTensor

# The nested structures that modules take and return; torch has no public name for it.
from torch.utils import _pytree as pytree

# Modes that hear of every operator; a page of torch's documentation names it here.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "TorchDispatchMode", "is_in_backward", "pytree"]


def is_in_backward() -> bool:
    """Return whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1

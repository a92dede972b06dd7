"""The only imports of torch's private modules in this package.

Each was seen in torch 2.11 to 2.15; a version that lacks one fails here, at import.
"""

from __future__ import annotations

# The store that init_process_group met in; torch has no public accessor. Without it a
# broken collective cannot say which rank failed.
from torch.distributed.distributed_c10d import _get_default_store as default_store

# The metadata record that torch's DTensor constructor takes (its public constructors
# refuse placements they do not know).
from torch.distributed.tensor._dtensor_spec import (
    DTensorSpec as DTensorSpec,
    TensorMeta as TensorMeta,
)

# Walks nested arguments as torch's own dispatch does; public since 2.13 only in C++.
from torch.utils import _pytree as pytree

# Classes for which optimizers and gradient clipping use their batched (foreach) code; torch
# adds its own DTensor the same way. Without it clipping costs one collective per parameter.
from torch.utils._foreach_utils import _foreach_supported_types as foreach_supported_types

__all__ = ["DTensorSpec", "TensorMeta", "default_store", "foreach_supported_types", "pytree"]

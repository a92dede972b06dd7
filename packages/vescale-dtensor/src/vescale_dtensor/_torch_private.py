"""The only imports of torch's private modules in this package.

A version of torch that lacks one fails here, at import. All are there in 2.11 and 2.13.
"""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_dtensor

# One overload of an operator: what __torch_dispatch__ is called with.
from torch._ops import OpOverload as OpOverload

# Whether a profiler runs is a flag of this module.
from torch.autograd import profiler as autograd_profiler

# What connects processes, exchanged while ranks are threads; in torch 2.11 to 2.15.
from torch.distributed import (
    DistStoreError as DistStoreError,  # pyright: ignore[reportPrivateImportUsage]: public
    distributed_c10d as distributed_c10d,
)

# The mesh of an enclosing `with mesh:`; its public form is an argument that may be left out.
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources

# The store that init_process_group met in; torch has no public accessor. Without it a
# broken collective cannot say which rank failed.
from torch.distributed.distributed_c10d import _get_default_store as default_store

# The metadata record that torch's DTensor constructor takes (its public constructors
# refuse placements they do not know).
from torch.distributed.tensor._dtensor_spec import (
    DTensorSpec as DTensorSpec,
    TensorMeta as TensorMeta,
)

# Nested sharding of one dim from the inside out; fully_shard over tensor parallelism makes it.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# A process group that moves nothing; DeviceMesh needs one when ranks are emulated.
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

# Walks nested arguments as torch's own dispatch does; public since 2.13 only in C++.
from torch.utils import _pytree as pytree

# Classes for which optimizers and gradient clipping use their batched (foreach) code; torch
# adds its own DTensor the same way. Without it clipping costs one collective per parameter.
from torch.utils._foreach_utils import _foreach_supported_types as foreach_supported_types

# Leaves fake and tracing modes: process groups are made of real tensors even when compiling.
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# Adds lists of tensors, in one operator; optimizers are written with it. In torch 2.11 to 2.15.
foreach_add_: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]

# Runs operators on a wrapper itself, which has a shape but no elements.
no_dispatch: Any = torch._C._DisableTorchDispatch

# Makes a wrapper an alias of another in the eyes of C++; no element is touched.
share_storage: Any = torch._functionalize_unsafe_set  # pyright: ignore[reportPrivateImportUsage]

# What all distributed tensors are instances of, torch's and ours.
if TYPE_CHECKING or torch.__version__ >= "2.13":
    DTensorBase = torch_dtensor.DTensor
else:  # remove with torch 2.12
    from ._dtensor_base import DTensorBase as DTensorBase
DISTRIBUTED: tuple[type[torch_dtensor.DTensor], ...] = (torch_dtensor.DTensor, DTensorBase)

# The C++ constructor behind torch's DTensor. Its Python __init__ adds 2 us and does nothing.
new_dtensor: Any = torch.Tensor._dtensor__new__  # pyright: ignore[reportAttributeAccessIssue]

# A tensor without storage of its own that stands for others.
make_wrapper: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]


# Says of code what torch.compile does where it is called; it does not import the compiler.
_eval_frame: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]

_exclude_key: Any = torch._C._SetExcludeDispatchKeyGuard  # pyright: ignore[reportAttributeAccessIssue]


class seeing_lazy_bits:
    """Let operators heed the lazy bits of ``conj()``, which torch ignores inside a dispatch.

    torch excludes the key that resolves them when it enters ``__torch_dispatch__``; then even
    ``x.conj() * 1`` is wrong there, and so is every operator that is made of such.
    """

    def __enter__(self) -> None:
        keys = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative
        self._guards = [_exclude_key(key, False) for key in keys]
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *problem: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*problem)


try:
    # Since 2.13 a compiler sees a mesh as an opaque object and hands out placeholders for it.
    from torch._library.fake_class_registry import maybe_unwrap_fake_script_object
except ImportError:  # remove with torch 2.12

    def maybe_unwrap_fake_script_object(obj: Any) -> Any:
        return obj


# Can be written in Python; the names of parameters in their stubs differ from version to version.
ProcessGroupBase: Any = dist.ProcessGroup
WorkBase: Any = dist.Work
StoreBase: Any = dist.Store  # pyright: ignore[reportPrivateImportUsage]: public

# Has every thread know process groups of its own by name, as torch's tests of collectives do. In
# torch 2.11 to 2.15; without it a process could not hold several ranks.
isolate_threads: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # pyright: ignore[reportAttributeAccessIssue]: not in the stubs


def recorded_collectives() -> bytes:
    """Return what NCCL's flight recorder of this process has, pickled; empty without NCCL.

    In torch 2.11 to 2.15.
    """
    distributed: Any = getattr(torch._C, "_distributed_c10d", None)
    dump: Any = getattr(distributed, "_dump_nccl_trace", None)
    return b"" if dump is None else dump()


def real_mesh(mesh: Any) -> DeviceMesh:
    """Return the mesh that a compiler's placeholder stands for, or the mesh itself."""
    return maybe_unwrap_fake_script_object(mesh)


# What torch.compile does with a frame, and with those that it calls; in torch 2.11 to 2.15.
_NO_PROGRAM = _eval_frame._FrameExecStrategy(
    _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
)


def skip_frame(code: CodeType) -> None:
    """Have torch.compile begin no program in frames of this code. What they call, it may."""
    _eval_frame.set_code_exec_strategy(code, _NO_PROGRAM)


def is_profiler_enabled() -> bool:
    """Return whether a profiler of torch records now.

    ``record_function`` itself does not ask, and calls two operators. In torch 2.11 to 2.15.
    """
    return autograd_profiler._is_profiler_enabled


def default_mesh() -> DeviceMesh:
    """Return the mesh of the enclosing ``with mesh:``."""
    return _mesh_resources.get_current_mesh()


__all__ = [
    "DISTRIBUTED",
    "DTensorBase",
    "DTensorSpec",
    "DistStoreError",
    "FakeStore",
    "OpOverload",
    "ProcessGroupBase",
    "StoreBase",
    "StridedShard",
    "TensorMeta",
    "WorkBase",
    "default_mesh",
    "default_store",
    "disable_current_modes",
    "distributed_c10d",
    "foreach_add_",
    "foreach_supported_types",
    "is_profiler_enabled",
    "isolate_threads",
    "make_wrapper",
    "new_dtensor",
    "no_dispatch",
    "pytree",
    "real_mesh",
    "seeing_lazy_bits",
    "share_storage",
    "skip_frame",
]


def forward_derivative_level() -> int:
    """Return the level of forward-mode differentiation that is open, -1 for none.

    It is one for all threads of a process; without it ranks that are threads would mix up theirs.
    """
    return torch.autograd.forward_ad._current_level  # pyright: ignore[reportPrivateUsage]

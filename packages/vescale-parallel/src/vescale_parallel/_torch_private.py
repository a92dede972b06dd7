"""The only uses of torch's private names in this package.

Each was seen in torch 2.11 to 2.15; a version that lacks one fails here, at import.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch

# Tensors with shapes and no memory; without them a model could only be observed by running it.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable
from torch.distributed import ProcessGroup, distributed_c10d

# The rendezvous store, where ranks leave words for each other beside their collectives.
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store as default_store,
)

# Hooks of all modules; without them one could not leave them out where a module runs on zeros.
from torch.nn.modules.module import (
    _global_forward_hooks as global_forward_hooks,
    _global_forward_pre_hooks as global_forward_pre_hooks,
)
from torch.nn.parallel import DistributedDataParallel

# The function modes, of which the last one sees calls first; without them one could not leave a
# mode for a while.
from torch.overrides import (
    _get_current_function_mode as current_function_mode,
    _get_current_function_mode_stack as function_modes,
)

# The nested structures that modules take and return; torch has no public name for it.
from torch.utils import _pytree as pytree

# TorchDispatchMode is documented, though its module has an underscore; of the other one, the mode
# that sees operators first, which a compiled program would pass by.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode as current_dispatch_mode,
)

# Where F.cross_entropy and F.nll_loss look up what they end in, at every call; without it a
# function mode would have to see every function to hear of these two.
loss_kernels: Any = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]: not in its stubs

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Copies lists of tensors, in one operator; FSDP2 packs its parameters with it.
foreach_copy_: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]

# Fills a list of tensors with zeros, in one operator.
foreach_zero_: Callable[[list[torch.Tensor]], None] = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]

# How schedulers mark a ``step`` that they hang on an optimizer, and learn that it was called.
HUNG_BY_SCHEDULER, STEP_WAS_CALLED = "_wrapped_by_lr_sched", "_opt_called"

# Has no mode and no tensor subclass see functions; without it a mode that looks at what a module
# calls would take this package's own bookkeeping for the module's.
unseen_functions: Any = torch._C.DisableTorchFunction

# Of torch.func and torch.vmap: whether they run what is called now, what has it computed as if
# they did not, and what they wrap tensors in. Without it they would transform collectives.
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active  # pyright: ignore[reportAttributeAccessIssue]
outside_of_transforms: Any = torch._C._DisableFuncTorch  # pyright: ignore[reportAttributeAccessIssue]
functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

# The hooks that are asked next about what autograd keeps; without them one could not tell whether
# something, such as torch.utils.checkpoint, has put others before one's own.
saved_tensors_hooks_in_force: Callable[[bool], tuple[Any, Any] | None] = (
    torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
)

__all__ = [
    "HUNG_BY_SCHEDULER",
    "STEP_WAS_CALLED",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "as_written",
    "backward_pass",
    "backward_within_modes",
    "call_after_backward",
    "comes_to",
    "compiled_as_one_graph",
    "compiled_graph",
    "compiler_in_force",
    "current_dispatch_mode",
    "current_function_mode",
    "default_store",
    "fake_like",
    "foreach_copy_",
    "foreach_zero_",
    "function_modes",
    "functorch",
    "global_forward_hooks",
    "global_forward_pre_hooks",
    "group_timeout",
    "is_dynamo_error",
    "is_frame_of_disabled",
    "is_in_backward",
    "is_in_compiled_function",
    "is_transformed",
    "keeps_graph",
    "left_out",
    "loss_kernels",
    "make_wrapper",
    "makes_one_graph",
    "num_views",
    "outside_of_transforms",
    "parameters_of_ddp",
    "pytree",
    "restarts_compilation",
    "run_once_as_written",
    "saved_tensors_hooks_in_force",
    "set_timeout",
    "set_version",
    "unlimited_programs",
    "unseen_functions",
    "version_of",
]

# Public since torch 2.14, where the old name warns.
_set_timeout: Callable[[timedelta, ProcessGroup], None] = (
    getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
)

if torch.__version__ < "2.12":
    # Without a GPU the first thread to enter the mode there leaves torch a pointer to something
    # that ends with the thread, and the next one crashes. Let that be the thread that imports.
    with FakeTensorMode():
        pass


def make_wrapper(
    cls: type[torch.Tensor], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a tensor of a subclass that has this shape, and no memory of its own.

    DTensor is made so; without it a subclass would hold as much memory as its shape says.
    """
    return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def num_views(tensor: torch.Tensor) -> int:
    """Return how many tensors share this one's memory, itself and one more included.

    CUDA graphs of torch's compiler tell by the same number whether memory is still in use.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's values were written in place, as far as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Have torch count no more writes to a tensor than there were."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass in progress has ended.

    FSDP2 does the same; without it gradients could not be summed after the last one.
    """
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)


def backward_within_modes(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> None:
    """Do what ``torch.autograd.backward`` does, with the function modes of now.

    A mode sees that function, and is left while it runs: what backward runs again in Python, the
    blocks of ``torch.utils.checkpoint``, would not compute as it did in forward.
    """
    engine: Any = Variable._execution_engine
    flags = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward(tuple(outputs), tuple(gradients), False, False, (), **flags)


def fake_like(tensor: torch.Tensor, fake_mode: FakeTensorMode) -> torch.Tensor:
    """Return a tensor without storage, on the CPU: a parameter if the given one is a parameter.

    ``torch.empty`` within the mode and ``nn.Parameter`` around it do the same and take 15 times as
    long, which with a model's parameters for every dry run was a sixth of finding a plan.
    """
    meta = torch.empty(
        tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )
    fake: Any = FakeTensor(fake_mode, meta, torch.device("cpu"))
    if isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True
    return fake


def group_timeout() -> timedelta | None:
    """Return how long a collective of the default group waits, None if it has no limit.

    Groups made later, a mesh's among them, otherwise wait for torch's own half hour.
    """
    group: Any = _get_default_group()
    device = "cuda" if "cuda" in str(group._device_types) else "cpu"
    options = group._get_backend(torch.device(device)).options
    return None if options is None else options._timeout


def set_timeout(group: ProcessGroup) -> None:
    """Give a group the timeout of the default group."""
    timeout = group_timeout()
    if timeout is not None:
        _set_timeout(timeout, group)


def backward_pass() -> int:
    """Return a number of the backward pass that this thread is running, -1 for none."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Return whether this thread is running a backward pass."""
    return backward_pass() != -1


def comes_to(node: Any) -> bool:
    """Return whether the backward pass in progress comes to a node of its graph.

    Those that end at some tensors (``inputs=``) leave out what does not lead there. FSDP2's hooks
    on several gradients ask the same, through ``torch.autograd.graph.register_multi_grad_hook``.
    """
    return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportAttributeAccessIssue]


def parameters_of_ddp() -> Iterator[torch.Tensor]:
    """Yield what the `DistributedDataParallel` reduces that calls its module now, if one does.

    torch.compile asks for it, too. Of calls in several threads at once, as of copies in dry runs,
    torch takes one for the latest that has ended, whose copy may have been cleared since.
    """
    active = DistributedDataParallel._get_active_ddp_module()  # pyright: ignore[reportPrivateUsage]
    if active is not None and "_parameters" in vars(active):
        yield from active.parameters()


def keeps_graph() -> bool:
    """Return whether the backward pass in progress leaves its graph for another one.

    ``retain_graph`` of a pass within it has to be the same; compiled autograd asks it, too.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def compiled_graph(graph: Any, inputs: Sequence[Any], backend: str) -> Callable[..., Any]:
    """Return a graph of torch.compile as one of its backends compiles it.

    Random numbers are those of eager operators, which inductor else replaces by its own. Operators
    that do not depend on each other keep their order, which inductor else chooses by sizes: ranks
    whose shards differ would begin collectives in another one. torch takes such options only
    together with the name of a backend, and not from a backend of ours.
    """
    if backend == "inductor":
        from torch import _inductor

        compile_graph = cast("Any", _inductor).compile
        options = {"fallback_random": True, "reorder_for_peak_memory": False}
        return compile_graph(graph, list(inputs), options=options)
    return cast("Any", torch._dynamo).lookup_backend(backend)(graph, inputs)


def left_out(function: Callable[_P, _T], why: str) -> Callable[_P, _T]:
    """Return a function that runs as it is written in what torch compiles: graphs break there.

    What is set here is what ``torch.compiler.disable`` sets, which imports the compiler.

    Args:
        function: Is not traced, nor is what it calls.
        why: What is said of the break.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not is_in_compiled_function():
            return function(*args, **kwargs)
        with as_written():
            return function(*args, **kwargs)

    made: Any = run
    made._torchdynamo_disable, made._torchdynamo_disable_msg = True, why
    return run


# What compiles the functions that Python calls; it does not import the compiler.
_eval_frame: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]


def is_in_compiled_function() -> bool:
    """Whether torch.compile compiles this, or would compile the next function that is called."""
    return torch.compiler.is_compiling() or callable(_eval_frame.get_eval_frame_callback())


def is_traced_by_dynamo() -> bool:
    """Whether a function is being compiled, and this runs for it or is a part of it."""
    guards: Any = cast("Any", torch)._guards
    return torch.compiler.is_compiling() or guards.TracingContext.try_get() is not None


def makes_one_graph() -> bool:
    """Whether this is called by what was compiled with ``fullgraph=True``, and has to be a graph.

    Since torch 2.12. Before, what could not be compiled ran as it is written.
    """
    exchange = getattr(_eval_frame, "set_fullgraph_compiled_frame_count", None)
    if exchange is None:
        return False
    count = exchange(-1)
    exchange(count)
    return count >= 0


def compiled_as_one_graph(module: torch.nn.Module) -> bool:
    """Whether ``module.compile(fullgraph=True)`` was called."""
    compiled: Any = module._compiled_call_impl  # pyright: ignore[reportPrivateUsage]
    if compiled is None:
        return False
    closure = zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True)
    by: Any = next((cell.cell_contents for name, cell in closure if name == "self"), None)
    return bool(getattr(by, "fullgraph", False))


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Have torch.compile compile no function that is called meanwhile, in this thread.

    Of blocks that run again in backward, a program may keep other tensors than their forward did.
    """
    if not is_in_compiled_function():
        yield
        return
    before = _eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        _eval_frame.set_eval_frame(before)


def compiler_in_force(exchanged_for: Any = None) -> Any:
    """Return what torch.compile calls of functions without a program, in this thread.

    A callable that takes a frame, or None or False if nothing is compiled.
    """
    if exchanged_for is None:
        return _eval_frame.get_eval_frame_callback()
    return _eval_frame.set_eval_frame(exchanged_for)


def unlimited_programs() -> contextlib.AbstractContextManager[None]:
    """Let torch.compile compile code again, however often it has."""
    limits = ("recompile_limit", "accumulated_recompile_limit")
    return cast("Any", torch._dynamo).config.patch(dict.fromkeys(limits, sys.maxsize))


def is_frame_of_disabled(depth: int) -> bool:
    """Whether a caller is what ``torch.compiler.disable(recursive=False)`` made of a function.

    torch looks for it on the stack, right before its own frames: ours would be between them.
    """
    decorators: Any = torch._dynamo.decorators  # pyright: ignore[reportAttributeAccessIssue]
    code = getattr(decorators, "_nonrecursive_disable_wrapper_code", None)
    return sys._getframe(depth).f_code is code


def run_once_as_written(*, what_it_calls: bool) -> Any:
    """Return what has torch.compile make no program of a function, in this call of it."""
    types: Any = torch._dynamo.types  # pyright: ignore[reportAttributeAccessIssue]
    no, yes = types.FrameAction.RUN_ONLY, types.FrameAction.DEFAULT
    way = types.FrameExecStrategy(no, no if what_it_calls else yes)
    return types.ConvertFrameReturn(frame_exec_strategy=way, apply_to_code=False)


def restarts_compilation(error: Exception) -> bool:
    """Whether torch.compile raises this for itself, to look at a frame once more."""
    return isinstance(error, cast("Any", torch._dynamo).exc.RestartAnalysis)


def is_dynamo_error(error: Exception) -> bool:
    """Whether torch.compile could not compile, as opposed to what a program itself raises."""
    return isinstance(error, cast("Any", torch._dynamo).exc.TorchDynamoException)

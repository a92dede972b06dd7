"""Forward hooks of users, run by the stage of a pipeline that has what they see.

[Note: hooks see values]
Blocks, and modules with parameters, are only called on their own stage. Modules around the blocks,
modules without parameters and the placeholders' skeletons are called on other stages as well, with
placeholders in place of what these have not computed. A hook would read zeros there, so it is left
out: it runs where all that it is given is there. What depends on the batch alone is there on every
stage. Where the module is a part of this stage, but an argument was computed earlier and not sent,
the hook runs, and reading that argument is an error that names it.

transformers' hooks that collect hidden states for the model's own forward (a vision tower's, of
which LLaVA takes one) keep what they are given and read none of it. They see placeholders, too:
what forward takes of these later crosses the cut by its name.

A hook that was left out elsewhere must not decide what is sent: functions that it calls get no
names, and replacing a tensor that a later stage takes by its name is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from vescale_dtensor import own_variable
from vescale_parallel._model.copies import collects_outputs
from vescale_parallel._torch_private import global_forward_hooks, global_forward_pre_hooks, pytree

from .placeholders import Placeholder, PlaceholderUsedError
from .stage_run import StageRun

_OWN = ("torch.nn.utils.", "vescale_parallel.")
_Hooks = MutableMapping[int, Callable[..., Any]]


class _Now:
    """What runs on this rank: the run of a stage, None outside of one.

    ``names`` are those of the modules around its blocks. ``is_outline`` says whether a module runs
    for the shapes of what it returns.
    """

    run: StageRun | None = None
    names: Mapping[nn.Module, str] = {}
    is_outline: bool = False


own_variable(_Now, "run")
own_variable(_Now, "names")
own_variable(_Now, "is_outline")


@contextlib.contextmanager
def hooks_where_real(modules: Mapping[nn.Module, str], run: StageRun) -> Iterator[None]:
    """Have hooks of these modules, by their names, and global ones run where what they see is."""
    for hooks, is_pre in ((global_forward_pre_hooks, True), (global_forward_hooks, False)):
        # They stay wrapped: other ranks of this process may have a run of their own.
        _wrap(hooks, is_pre)
    wrapped = [
        (hooks, _wrap(hooks, is_pre))
        for module in modules
        for hooks, is_pre in ((module._forward_pre_hooks, True), (module._forward_hooks, False))
        if hooks
    ]
    before = _Now.run, _Now.names
    _Now.run, _Now.names = run, modules
    try:
        yield
    finally:
        _Now.run, _Now.names = before
        for hooks, users in wrapped:
            # One that has removed itself is not put back.
            hooks.update({key: hook for key, hook in users.items() if key in hooks})


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Leave out global hooks where a module runs on shapes or zeros, in the run of a stage."""
    before, _Now.is_outline = _Now.is_outline, True
    try:
        yield
    finally:
        _Now.is_outline = before


def collected(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Return what stands for a module's output, once hooks that collect outputs have seen it."""
    for hook in module._forward_hooks.values():
        if collects_outputs(hook):
            hook(module, args, output)
    return output


def _wrap(hooks: _Hooks, is_pre: bool) -> dict[int, Callable[..., Any]]:
    """Wrap the hooks of users; return what they were."""
    users = {
        key: hook for key, hook in hooks.items() if not (_is_own(hook) or collects_outputs(hook))
    }
    hooks.update({key: functools.partial(_run, hook, is_pre) for key, hook in users.items()})
    return users


def _is_own(hook: Any) -> bool:
    hook = hook.func if isinstance(hook, functools.partial) else hook
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{where}.".startswith(_OWN)


def _run(hook: Callable[..., Any], is_pre: bool, module: nn.Module, *given: Any) -> Any:
    """Call a hook as torch does, unless another stage has what it is to see."""
    run = _Now.run
    if run is None:
        return hook(module, *given)
    if _Now.is_outline:
        return None
    lacks = any(isinstance(leaf, Placeholder) for leaf in pytree.tree_leaves(given))
    if lacks and not run.is_own:
        return None
    usable = Placeholder.usable
    Placeholder.usable = False
    try:
        with run.unnamed():
            result = hook(module, *given)
    except PlaceholderUsedError as error:
        raise ValueError(
            f"{_told(hook, module)} reads a tensor that another "
            "stage of the pipeline has computed and that was not sent to this one, since forward "
            "does not need it here. Read what the module returns, or register it on the module "
            "that computes the tensor"
        ) from error
    finally:
        Placeholder.usable = usable
    if result is not None:
        before = given if is_pre else given[-1:]
        _check_replaced(hook, run, module, before, result)
    return result


def _check_replaced(
    hook: Callable[..., Any], run: StageRun, module: nn.Module, before: Any, after: Any
) -> None:
    """Refuse a hook's tensor in place of one that is sent by the name it has without the hook."""
    kept = {id(leaf) for leaf in pytree.tree_leaves(after)}
    for leaf in pytree.tree_leaves(before):
        if isinstance(leaf, Tensor) and id(leaf) not in kept and run.is_named(leaf):
            raise ValueError(
                f"{_told(hook, module)} replaces a tensor that a "
                "later stage of the pipeline needs beside the arguments of its blocks. Change it "
                "in the code of the module, or write to it in place"
            )


def _told(hook: Any, module: nn.Module) -> str:
    hook = hook.func if isinstance(hook, functools.partial) else hook
    name = _Now.names.get(module) or f"a {type(module).__name__}"
    return f"{getattr(hook, '__qualname__', type(hook).__qualname__)!r}, a hook of {name!r},"

"""What an operator does to distributed tensors.

[Note: classes of operators] Every operator is in one of four classes.

1. A rule: a signature or a view, see signature.py and view_plan.py. Inputs move as little as
   possible, every rank computes its part.
2. A decomposition into operators that have rules.
3. The fallback: inputs are gathered and the result is whole on every rank, see
   replicate_fallback.py.
4. Refused, with the reason.

When all inputs are whole on every rank, the operator itself runs on them: no rule is needed.

Which it is depends on the operator, the layouts of the tensors and the other arguments only, so
the answer is kept under a key made of these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._caches import forget_with_world
from ._comm.emulation import is_emulated
from ._layout.layout import Layout, layout_of_spec
from ._logging import package_logger
from ._rules import DECOMPOSED, HANDLERS, REFUSED, WRITES_UNTOLD, rule_of
from ._rules.foreach import is_foreach, plan_foreach
from ._sharding.gathered_views import follow
from ._sharding.local_plan import (
    LocalCall,
    Plan,
    distributed,
    finisher,
    in_order,
    is_in_order,
    plan_again,
    plan_of_spec,
    told,
)
from ._sharding.mutation import resizes
from ._sharding.op_call import OpCall, Unsupported, is_view, written_values
from ._sharding.replicate_fallback import gathered
from ._sharding.signature import Signature, choose
from ._sharding.view_plan import View, plan_view
from ._tensor import plain_operands
from ._tensor.dtensor import DTensor
from ._tensor.pending_sums import known_sum, link
from ._torch_private import (
    DISTRIBUTED,
    OpOverload,
    new_dtensor,
    pytree,
    seeing_lazy_bits,
    share_storage,
)

_log = package_logger("vescale.dtensor")
_plans: dict[tuple[Any, ...], Plan] = {}
_MAX_PLANS = 1 << 16
forget_with_world(_plans.clear)


class _Uncachable(Exception):
    """An argument whose value cannot be part of a key."""


def dispatch(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], sums_known: bool = False
) -> Any:
    """Run an aten operator of which at least one argument is a DTensor.

    ``sums_known``: what pending sums add up to was put in their place where it is known.
    """
    if torch.is_inference_mode_enabled() and is_view(func) and not torch.is_inference(args[0]):
        # A view counts writes together with its base, which inference tensors do not.
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(func, args, kwargs)
    if plain_operands.here.is_told:
        plain_operands.tell(func, args, kwargs)
    key: list[Any] = [func]
    locals_: list[Any] = []
    named_locals: list[Any] = []
    aliases: list[DTensor] = []
    try:
        for arg in args:
            if type(arg) is DTensor:
                if arg._alias_of is not None:
                    arg._settled()
                    aliases.append(arg)
                made: Layout = arg._spec.layout  # pyright: ignore[reportAttributeAccessIssue]: ours
                if made.is_partial and not sums_known:
                    return _with_sums(func, args, kwargs)
                key.append(made)
                locals_.append(arg._local_tensor)
            else:
                _describe(arg, key, locals_, aliases)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                _describe(value, key, named_locals, aliases)
        plan = _plans.get(tuple(key))
    except (_Uncachable, TypeError):
        # A TypeError if sizes of a plain tensor are symbols, which have no hash.
        args, kwargs = pytree.tree_map_only(tuple(_SYMBOLS), _specialized, (args, kwargs))
        return _followed(func, args, kwargs, _plan(func, args, kwargs)(func, args, kwargs))
    if plan is None:
        plan = _plan(func, args, kwargs)
        if len(_plans) > _MAX_PLANS:
            _plans.clear()
        if plan is _whole:
            result = _whole(func, args, kwargs)
            _plans[tuple(key)] = plan_again(OpCall(func, args, kwargs), result) or _whole
            return _followed(func, args, kwargs, result)
        if not (func._schema.is_mutable or is_view(func)):
            result = plan(func, args, kwargs)
            if not is_in_order(result):
                plan, result = in_order(plan), told(result)
            _plans[tuple(key)] = plan
            return _followed(func, args, kwargs, result) if aliases else result
        _plans[tuple(key)] = plan
    if isinstance(plan, LocalCall):
        named = dict(zip(kwargs, named_locals, strict=True)) if kwargs else {}
        result = plan.function(*locals_, **named)
        if plan.layout is None:
            result = plan.finish(args, kwargs, result)
        else:
            result = new_dtensor(DTensor, result, plan.layout.spec, requires_grad=False)
    else:
        result = plan(func, args, kwargs)
    return _followed(func, args, kwargs, result) if aliases or "out" in kwargs else result


def _with_sums(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on what pending sums add up to, where some operator before it asked."""
    if is_view(func):
        result = dispatch(func, args, kwargs, sums_known=True)
        if func is not torch.ops.aten._unsafe_view.default:  # counts writes by itself
            link(result, args[0], lambda whole: dispatch(func, (whole, *args[1:]), kwargs))
        return result
    if func._schema.is_mutable:
        written = {id(value) for value in written_values(func, args, kwargs)}
        args = tuple(x if id(x) in written else known_sum(x) for x in args)
    elif func not in WRITES_UNTOLD:
        args = tuple(map(known_sum, args))
    return dispatch(func, args, kwargs, sums_known=True)


def _followed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Let views of gathered views follow them, and writes reach what they are views of."""
    if is_view(func) and isinstance(args[0], DTensor) and args[0]._alias_of is not None:
        follow(args[0], result)
    if func._schema.is_mutable:
        for written in written_values(func, args, kwargs):
            if not isinstance(written, DTensor):
                continue
            if written._alias_of is not None:
                written._alias_of.write_back(written)
            if "out" in kwargs and written._base is not None:
                # matmul asks whether the out= it reshaped and had written is the caller's still.
                share_storage(written, written._base)
    return result


# What a compiler has for numbers that may be others in the next call. Layouts are integers, so
# the program becomes one for the numbers of this call.
_SYMBOLS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _specialized(symbol: Any) -> int | float | bool:
    return _SYMBOLS[type(symbol)](symbol)


_BY_VALUE = (
    int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _describe(arg: Any, key: list[Any], locals_: list[Any], aliases: list[DTensor]) -> None:
    """Append what identifies ``arg`` to ``key``, and its local counterpart to ``locals_``."""
    kind = type(arg)
    if kind is DTensor:
        if arg._alias_of is not None:
            arg._settled()
            aliases.append(arg)
        key.append(layout_of_spec(arg._spec))
        locals_.append(arg._local_tensor)
        return
    if kind is list or kind is tuple:
        if arg and type(arg[0]) is int:  # then all are: sizes or dims
            key.append(tuple(arg))
            locals_.append(arg)
            return
        key.append(len(arg))
        inner: list[Any] = []
        for each in arg:
            _describe(each, key, inner, aliases)
        locals_.append(inner)
        return
    locals_.append(arg)
    if kind is bool:
        key.append("true" if arg else "false")
    elif kind is float or kind is complex:
        # Values are left out, so that a new learning rate needs no new plan; but a probability
        # of zero makes another operator of a dropout.
        key.append(kind if arg else (kind, "zero"))
    elif isinstance(arg, DISTRIBUTED):
        key.extend((kind, layout_of_spec(arg._spec)))
        locals_[-1] = arg._local_tensor
    elif isinstance(arg, Tensor):
        key.extend((kind, arg.dtype, tuple(arg.shape), arg.stride(), arg.is_neg()))
    elif isinstance(arg, _BY_VALUE):
        key.append(arg)
    elif isinstance(arg, torch.Generator):
        key.append(torch.Generator)
    else:
        raise _Uncachable


def _plan(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Return what to do for a call not seen before."""
    _log.debug("planning a new form of %s", func)
    plan = _chosen_plan(func, args, kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    if not any(isinstance(x, Tensor) and (x.dtype.is_complex or x.is_neg()) for x in leaves):
        return plan

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with seeing_lazy_bits():
            return plan(func, args, kwargs)

    return run


def _chosen_plan(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    if func in REFUSED:
        raise Unsupported(f"{func} is refused on distributed tensors: {REFUSED[func]}")
    handler = HANDLERS.get(func)
    if handler is not None:
        return handler
    call = OpCall(func, args, kwargs)
    if is_foreach(func):
        return plan_foreach(call)
    if len(call.meshes) > 1:
        return gathered
    if resizes(call) or (is_emulated() and _writes_plain(call)):
        return gathered
    rule = rule_of(func)
    if all(made.is_replicated for made in call.layouts) and not is_view(func):
        return _whole
    if rule is not None:
        try:
            planned = _ruled_plan(call, rule(call))
        except NotImplementedError:
            planned = None
        if planned is not None:
            call.release()
            return planned
    if func in DECOMPOSED and all(made.shape.numel() for made in call.layouts):
        # Not of empty tensors: torch refuses to reduce nothing, which the whole may not do.
        return DECOMPOSED[func]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    if composite and not func._schema.is_mutable:
        return _composed
    return gathered


def _ruled_plan(call: OpCall, found: Signature | View | None) -> Plan | None:
    if isinstance(found, View):
        return plan_view(call, found)
    op_spec = None if found is None else choose(call, found)
    return None if found is None or op_spec is None else plan_of_spec(call, found, op_spec)


def _writes_plain(call: OpCall) -> bool:
    return any(not isinstance(call.tensors[i], DISTRIBUTED) for i in call.written)


def _composed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that torch takes apart, which autograd did not do in inference mode."""
    return func.decompose(*args, **kwargs)


def _whole(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose inputs are whole on every rank; so are its results."""
    call = OpCall(func, args, kwargs)
    locals_ = [distributed(tensor, call)._local_tensor for tensor in call.tensors]
    local_args, local_kwargs = call.with_tensors(locals_)
    result = func(*local_args, **local_kwargs)
    return finisher(func, call.mesh)(args, kwargs, result)

"""Where a rank is in a model: which module call it runs, read off its stack.

Nothing is noted while a model runs: modules, stages, parameters and micro-batches are in the local
variables of the functions that a rank has entered. They are looked at when a collective broke.
"""

from __future__ import annotations

import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import vescale_dtensor
from vescale_dtensor import find_positions_by
from vescale_parallel._data_parallel.param_group import ParamGroup
from vescale_parallel._pipeline.execution.links import Links
from vescale_parallel._pipeline.execution.run import Execution
from vescale_parallel._torch_private import is_in_backward

from .engine import Engine
from .optimizer.parallel_optimizer import ParallelOptimizer

_PASSES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}
# Whose lines are not those of the user's program.
_LIBRARIES = tuple(
    str(Path(each).parent)
    for each in (
        torch.__file__, vescale_dtensor.__file__, str(Path(__file__).parent), traceback.__file__
    )
)  # fmt: skip
_models: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def name_modules_of(model: nn.Module) -> None:
    """Have errors of collectives say in which module of a model a rank was."""
    _models[id(model)] = model
    find_positions_by(position)


def position(frames: Iterator[FrameType]) -> str:
    """Return in which call of a module of this rank's models frames are, innermost first."""
    found = _Found()
    for frame in frames:
        found.look_at(frame)
    return found.said()


class _Found:
    """What frames tell, the innermost of each kind."""

    def __init__(self) -> None:
        self._module = self._weight = self._stage = self._waits = self._step = self._line = ""
        self._is_backward = is_in_backward()
        # A list of references, for other threads that are ranks add models meanwhile.
        models = [model for each in _models.valuerefs() if (model := each()) is not None]
        self._modules = {id(m): (n, m) for model in models for n, m in model.named_modules()}
        self._weights = {id(p): n for model in models for n, p in model.named_parameters()}

    def look_at(self, frame: FrameType) -> None:
        code, names = frame.f_code, frame.f_globals.get("__name__")
        if code is nn.Module._call_impl.__code__:
            self._module = self._module or self._called(frame.f_locals.get("self"))
        elif code is Execution._compute.__code__:
            self._stage = self._stage or _pass_of(frame.f_locals)
        elif code is Links._wait.__code__:
            self._waits = self._waits or _message_of(frame.f_locals)
        elif code is ParallelOptimizer.step.__code__:
            self._step = "in optimizer.step()"
        elif code is Engine._call.__code__:
            self._step = self._step or "in a call of the model, outside of its forward"
        elif code.co_name == "_engine_run_backward" and names == "torch.autograd.graph":
            self._is_backward = True
        elif not self._weight and "ctx" in code.co_varnames:
            self._weight = self._nearest_weight(frame.f_locals.get("ctx"))
        elif not self._weight and isinstance(frame.f_locals.get("self"), ParamGroup):
            self._weight = _first_name(frame.f_locals["self"])
        if not self._line and not code.co_filename.startswith((*_LIBRARIES, "<")):
            self._line = f"at {code.co_filename}:{frame.f_lineno}"

    def said(self) -> str:
        """Return it in words."""
        again = ", run again in backward" if self._is_backward else ""
        if self._module:
            where = f"in forward of {self._module}{again}"
        elif self._is_backward:
            where = "in backward" + (f", at {self._weight!r}" if self._weight else "")
        else:
            where = self._step or (f"between calls of the model, {self._line}" * bool(self._line))
        return ", ".join(each for each in (self._waits, where, self._stage) if each)

    def _called(self, module: object) -> str:
        name, known = self._modules.get(id(module), ("", None))
        if known is None:
            return ""
        return f"{name!r} ({type(known).__name__})" if name else "the model itself"

    def _nearest_weight(self, node: Any) -> str:
        """Return the parameter that the fewest nodes of the graph lie before, behind this one."""
        todo, seen = deque([node]), set[Any]()
        while todo:
            each = todo.popleft()
            if each is None or each in seen:
                continue
            seen.add(each)
            name = self._weights.get(id(getattr(each, "variable", None)))
            if name is not None:
                return name
            todo += [following for following, _ in _next_functions(each)]
        return ""


def _next_functions(node: Any) -> tuple[tuple[Any, int], ...]:
    """Return what follows a node in backward: nothing if it is none, or in no graph so far."""
    try:
        return node.next_functions
    # Of a context of a function whose forward still runs, torch 2.11 raises a RuntimeError.
    except (AttributeError, RuntimeError):
        return ()


def _pass_of(names: Mapping[str, Any]) -> str:
    action = names.get("action")
    if action is None:
        return ""
    kind = _PASSES.get(action.kind, action.kind)
    return f"{kind} of stage {action.stage}, micro-batch {action.microbatch}"


def _message_of(names: Mapping[str, Any]) -> str:
    message = names.get("message")
    if message is None:
        return ""
    is_forward = message.lane.kind == "F"
    sender = message.stage - 1 if is_forward else message.stage + 1
    what = "activations" if is_forward else "gradients"
    return f"for {what} of stage {sender} over pp from pipeline rank {message.lane.source}"


def _first_name(group: ParamGroup) -> str:
    return next((fqn for param in group.params for fqn in param.fqns), "")

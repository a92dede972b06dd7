"""What happens to a parallelized model outside of its calls, and could not be right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._torch_private import is_in_backward


class KnownModules:
    """Notices modules and parameters that were added to a model after ``parallelize``.

    They would be this rank's alone: nothing averages their gradients over ranks.
    """

    def __init__(self, model: nn.Module, params: Sequence[ShardedParameter]) -> None:
        self._model, self._params = model, params
        self._seen = _children(model)

    def check(self) -> None:
        """Raise if the model has a parameter that it had not, or a module that was compiled.

        Raises:
            ValueError: With its name.
        """
        if all(
            tuple(module._modules.values()) == children and len(module._parameters) == num
            for module, children, num in self._seen
        ):
            return
        _refuse_replaced(self._model)
        known = {id(param.sharded) for param in self._params}
        for fqn, parameter in self._model.named_parameters():
            if id(parameter) not in known:
                raise ValueError(
                    f"{fqn!r} was added to the model after parallelize, so it is this rank's "
                    "alone and would not train as on one device; add modules (adapters, a new "
                    "head) before parallelize"
                )
        self._seen = _children(self._model)


def _refuse_replaced(model: nn.Module) -> None:
    for fqn, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            raise ValueError(
                f"{fqn!r} was replaced by what torch.compile made of it, which has other names "
                "for its parameters; compile it in place, module.compile(), or give the plan "
                "compile='blocks'"
            )


def _children(model: nn.Module) -> list[tuple[nn.Module, tuple[nn.Module | None, ...], int]]:
    return [(m, tuple(m._modules.values()), len(m._parameters)) for m in model.modules()]


def refuse_parts(model: nn.Module, blocks: Iterable[str], is_running: Callable[[], bool]) -> None:
    """Have parts of a model refuse to be trained by calls that do not go through the model.

    Only a call of the model averages over data-parallel ranks and brings stages together.

    Args:
        model: The model, whose blocks and modules with parameters outside of them are watched.
        blocks: FQNs of its blocks.
        is_running: Whether a call of the model is in progress.
    """
    blocks = tuple(blocks)
    for fqn, module in model.named_modules():
        within = any(fqn.startswith(f"{block}.") for block in blocks)
        if within or not fqn or not (fqn in blocks or any(True for _ in module.parameters(False))):
            continue

        def check(part: nn.Module, args: object, fqn: str = fqn) -> None:
            if is_running() or not torch.is_grad_enabled() or is_in_backward():
                return
            if any(parameter.requires_grad for parameter in part.parameters()):
                raise ValueError(
                    f"{fqn!r} was called from outside of a call of the parallelized model, by "
                    "model.forward(...) or a method of its own for example. Its gradients would "
                    "be this rank's alone. Call the model, model(...), and have its forward do "
                    "the rest; or call the part under torch.no_grad()"
                )

        module.register_forward_pre_hook(check, prepend=True)


_TRAINERS = {"transformers.trainer": "transformers.Trainer", "accelerate": "accelerate"}
# Not all of Fabric, which may have launched the program.
_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")


def refuse_trainers() -> None:
    """Raise if the loop that calls the model makes it parallel in its own way.

    Raises:
        ValueError: With what to do instead.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module in _FABRIC:
            raise ValueError(
                "Lightning Fabric wraps the model for a parallelism of its own, which does not "
                "fit a parallelized model: leave out fabric.setup and fabric.setup_dataloaders, "
                "and use the model, optimizer and loader that parallelize returns; "
                "fabric.backward, fabric.log and fabric.print work with them"
            )
        name = _TRAINERS.get(module) or _TRAINERS.get(module.partition(".")[0])
        if name is not None:
            raise ValueError(
                f"{name} shards the data and wraps the model for its own kind of parallelism, "
                "which does not fit a parallelized model: ranks that share rows would get other "
                "ones. Write the loop yourself, around the model, optimizer and loader that "
                "parallelize returns; model.save_pretrained(...) writes what transformers loads"
            )
        frame = frame.f_back


# What torch says of parameters that no graph leads to, and of those that a transform has wrapped.
_OF_SHARDED = ("appears to not have been used in the graph", "storage of TensorWrapper")


def explain_gradients(error: Exception, params: Iterable[ShardedParameter]) -> None:
    """Raise why forward got no gradients of parameters of blocks, if that is its error.

    Raises:
        ValueError: If some are sharded where forward runs, with what to do.
    """
    if not any(text in str(error) for text in _OF_SHARDED):
        return
    hidden = [p for p in params for at, name in p.sites if at._parameters[name] is p.sharded]
    if hidden:
        example = hidden[0].fqns[0]
        raise ValueError(
            "forward asked for a gradient that it did not get, by torch.autograd.grad or "
            f"torch.func ({error}); if it is of a parameter of a block, as {example!r}: "
            "data_parallel.zero_stage 2 and 3 keep these sharded outside of the forward of the "
            "block. Use data_parallel.zero_stage 1, or differentiate within the block"
        ) from error


_MOST_NAMED = 4


def read_in(tensor: Tensor, params: Sequence[ShardedParameter]) -> str:
    """Return which of the parameters a tensor was computed from, as far as autograd knows."""
    names = {id(param.sharded): param.fqns[0] for param in params}
    found: list[str] = []
    seen: set[Any] = set()
    todo: list[Any] = [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        found += [] if name is None else [repr(name)]
        todo += [following for following, _ in node.next_functions]
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        return " and ".join(sorted(found)[:_MOST_NAMED]) + more
    return f"a parameter of a block, one of {[param.fqns[0] for param in params]}"

"""The class of a parallelized model: its calls go through an engine.

[Note: who wraps a module]
What ``parallelize`` adds to a model, in the order in which one call meets it, outermost first:

1. class: :class:`ParallelModule` before the model's own class. ``model(...)`` becomes
   :meth:`Engine.call` around ``nn.Module.__call__``. Blocks of a pipeline have
   :class:`~vescale_parallel._pipeline.stage_module.StagedModule` before theirs.
2. modes, entered by the engine for one call: the rows of the batch, random numbers, token means,
   and, under tensor parallelism, the mode that lifts plain tensors to distributed ones.
3. hooks before forward: leaving the mode of token means (prepended last, so first; see
   [Note: where losses are seen]), ZeRO's gather, then those that enter tensor-parallel regions,
   then users' own that were there before, which see local activations.
4. forward of the instance, innermost first: tensor parallelism's sum in parts or lookup of own
   rows; random numbers in part; coupled rows; recomputation in backward.
5. parameters: plain ones of this rank while forward and backward run, else DTensors of global
   shape. See :class:`~vescale_parallel._parameters.sharded_parameter.ShardedParameter`.
6. hooks after forward: tensor parallelism's (prepended, so that users' hooks see whole
   activations), users' own, then ZeRO's free and the mode again, also when forward raises.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import nn

from vescale_parallel._model.code import mix_in
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._torch_private import is_in_compiled_function, left_out, makes_one_graph

from .engine import Engine
from .generation.encoders import encoders_by_calls
from .generation.images import images_in_calls
from .model_copies import ModelCopies

# What to do instead of compiling a whole model.
_BLOCKS = "compile the blocks: give the plan compile='blocks', or call block.compile() of each"
_BETWEEN = f"between its blocks ranks gather, send and average; {_BLOCKS}"


class ParallelModule(nn.Module):
    """Mixed into the class of a parallelized model; its calls go through an :class:`Engine`."""

    _vescale_engine: Engine
    _vescale_copies: ModelCopies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return self._vescale_engine.call(super().__call__, self, args, kwargs)
        # Of a call that torch.compile traces, this is all that it sees.
        is_compiled = self._compiled_call_impl is not None or is_in_compiled_function()
        forward = self._call_impl if is_compiled else super().__call__
        return _as_written(self, forward, args, kwargs, is_compiled)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank, without summing them over data-parallel ranks.

        Around the passes of a step but its last one, which sums them all. ``.grad`` raises when it
        is read before that, and so does ``optimizer.step``. Under ZeRO 2 and 3 a rank holds whole
        gradients meanwhile; without ``no_sync`` passes add up as well, sharded, for one reduction
        each. What counts is where ``backward()`` runs.
        """
        parameters = self._vescale_engine.parameters
        before, parameters.syncs = parameters.syncs, False
        try:
            yield
        finally:
            parameters.syncs = before

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Do what :meth:`no_sync` does from now on (False), or end it (True)."""
        self._vescale_engine.parameters.syncs = requires_gradient_sync

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the model, its shards on each rank. Every rank must call this."""
        return self._vescale_copies.copy(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a parallelized model cannot be pickled: its process groups are this process's. "
            "Save model.state_dict(), for example by vescale.save(path, {'model': model})"
        )


def give_engine(model: nn.Module, engine: Engine) -> None:
    """Have the calls of a model go through an engine, in place."""
    for module in model.modules():
        _in_order_of_calls(module._forward_pre_hooks)
        _in_order_of_calls(module._forward_hooks)
    mix_in(model, ParallelModule, _namespace_of(type(model)))
    object.__setattr__(model, "_vescale_engine", engine)


def _in_order_of_calls(hooks: MutableMapping[int, Any]) -> None:
    """Have hooks lie in the order in which they run, in place.

    A hook that is put before others moves within an OrderedDict, but not within the dict that
    this is. Dynamo of torch 2.11 finds by ``dict.keys`` what it has traced in the other order.
    """
    ordered = [*hooks.items()]
    hooks.clear()
    hooks.update(ordered)


def _namespace_of(cls: type[nn.Module]) -> dict[str, Any]:
    """Return what the class of a parallelized model has besides its bases."""
    namespace: dict[str, Any] = {}
    # Those of the model itself, if it has some.
    for name in ("no_sync", "set_requires_gradient_sync"):
        if hasattr(cls, name):
            namespace[name] = getattr(cls, name)
    generate: Callable[..., Any] | None = getattr(cls, "generate", None)
    if generate is not None:

        @functools.wraps(generate)
        def generate_on_ranks(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
            engine = self._vescale_engine
            if hasattr(self, "generation_config"):  # transformers', also below an adapter
                kwargs = engine.generation_options(kwargs)
            in_parts = engine.pipeline is not None or engine.parameters.gathers_in_forward
            images = images_in_calls(self, args, kwargs, in_parts=in_parts)
            with engine.logits.gathered(), encoders_by_calls(self), images:
                return generate(self, *args, **kwargs)

        namespace["generate"] = generate_on_ranks
    return namespace


@functools.partial(left_out, why=f"it calls a parallelized model: {_BETWEEN}")
def _as_written(
    model: ParallelModule,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_compiled: bool,
) -> Any:
    """Run a call that torch.compile does not trace; blocks that are compiled stay so."""
    engine = model._vescale_engine
    if hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable"):
        raise ValueError(
            f"forward of the parallelized {type(model).__name__} was replaced by what "
            f"torch.compile made of it; {_BLOCKS}"
        )
    name = type(model).__name__
    if is_compiled and makes_one_graph():
        raise ValueError(
            f"torch.compile of all of a parallelized {name} with fullgraph=True, but {_BETWEEN}"
        )
    if is_compiled and not engine.has_run:
        warn_at_user_line(
            f"torch.compile of all of a parallelized {name} compiles nothing: {_BETWEEN}"
        )
    return engine.call(forward, model, args, kwargs)

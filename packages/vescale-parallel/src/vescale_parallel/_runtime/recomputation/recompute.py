"""Run blocks again in backward instead of keeping their activations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_parallel._data_parallel.block_hooks import ready_to_run_again
from vescale_parallel._model.buffers import Buffers, BuffersBefore
from vescale_parallel._model.copies import snapshot
from vescale_parallel._model.several_runs.attributes import Attributes
from vescale_parallel._plan.recomputation import RecomputeMode
from vescale_parallel._rng.drawn_again import PythonAndNumpy

from .kept_operators import Contexts, keep_nothing, keep_operators

Around = Callable[[], AbstractContextManager[None]]


def recompute_blocks(
    model: nn.Module,
    blocks: Sequence[str],
    modes: Mapping[str, RecomputeMode],
    as_now: Callable[[], Around],
    keep: Sequence[str] = (),
    prepare: Callable[[nn.Module, Sequence[str]], object] = lambda *_: None,
) -> None:
    """Have blocks of a model run again in backward, in place; see :func:`recompute`.

    Args:
        model: The model.
        blocks: FQNs of those of this rank.
        modes: Of all blocks.
        as_now: As for :func:`recompute`.
        keep: What selective ones keep besides.
        prepare: Called with the model and those that run again before they are changed.
    """
    again = {fqn: modes[fqn] for fqn in blocks if modes[fqn] != "none"}
    if not again:
        return
    prepare(model, [*again])
    keep_no_caches(model)
    for fqn, mode in again.items():
        contexts = keep_operators(keep, fqn) if mode == "selective" else keep_nothing
        recompute(model.get_submodule(fqn), as_now, fqn, contexts)


def recompute(
    block: nn.Module,
    as_now: Callable[[], Around],
    fqn: str = "",
    contexts: Contexts = keep_nothing,
) -> None:
    """Have a block run its forward again in backward, in place.

    The second run is called with what the first one was: objects that a forward changes, as it
    does a cache of keys and values, are copied before, their tensors not. It finds the buffers and
    attributes that forward changes as the first run did, and leaves them as that one left them.

    ``as_now`` is called in the first run; it returns what makes the context of the second one.
    ``contexts`` make those in which forward alone runs, first and again.
    """
    kept = Buffers(block, fqn), Attributes(block, fqn)
    block.forward = functools.partial(_run, block, block.forward, *kept, as_now, contexts)


def _run(
    block: nn.Module,
    forward: Callable[..., Any],
    buffers: Buffers,
    attributes: Attributes,
    as_now: Callable[[], Around],
    contexts: Contexts,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    before = snapshot((args, kwargs))
    form = buffers.form()
    held, attributes_before = buffers.now(form), attributes.now()
    ran: list[Around] = []
    draws = PythonAndNumpy()
    # Not by checkpoint's context_fn: of both runs they have to be within what draws numbers.
    first, second = contexts()

    def run(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            ran.append(as_now())
            with draws.noted(), first:
                output = forward(*args, **kwargs)
            _learn(buffers, form, held)
            attributes.learn(attributes_before.written)
            return output
        ready_to_run_again(block)
        args, kwargs = snapshot(before)
        back = held.back(), attributes_before.back(attributes)
        with ran[0](), back[0], back[1], draws.again(), second:
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _learn(buffers: Buffers, form: object, held: BuffersBefore) -> None:
    if not buffers.is_known(form):
        buffers.learn(form, held.changed(by_value=True))
    held.keep_copies_of(buffers.known(form) | held.changed(by_value=False))


def keep_no_caches(model: nn.Module) -> None:
    """Have transformers' models make no cache in training, unless they are told to.

    A cache would keep what recomputing is to save; nothing but generation reads it.
    """
    if getattr(getattr(model, "config", None), "use_cache", False) is True:
        names = list(inspect.signature(model.forward).parameters)
        if "use_cache" in names:
            hook = functools.partial(_without_cache, names.index("use_cache"))
            model.register_forward_pre_hook(hook, with_kwargs=True)
            return
    for child in model.children():
        keep_no_caches(child)


def _without_cache(
    place: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not module.training or len(args) > place or kwargs.get("use_cache") is not None:
        return None
    return args, {**kwargs, "use_cache": False}

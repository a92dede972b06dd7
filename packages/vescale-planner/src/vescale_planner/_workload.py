"""The model as the planner sees it: parts in the order they run, each a few numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from vescale_parallel import (
    ExpertLayer,
    Observation,
    ObservationError,
    ParallelPlan,
    called_blocks,
    expert_layers,
    modules_outside_blocks,
    names_of_calls,
    observe,
    observed_calls,
    with_constraints,
)

from ._experts import (
    called_as_experts,
    chosen_of,
    counts_of,
    estimated_exchanges,
    observed_exchanges,
)
from ._parts import (
    ASSUMED_TOKENS,
    ParameterSize,
    Part,
    estimated_parts,
    observed_parts,
    ownership,
    with_attention,
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and what one row of its batch costs.

    Attributes:
        before: What runs before the blocks; everything if there are none to cut between.
        blocks: What a pipeline can be cut between; one for each call of a block, with the
            parameters of the block.
        after: What runs behind them.
        tied: Parameters of ``before`` that ``after`` uses too.
        block_names: Of each call of a block, the FQN or ``fqn#2``, as split points have it.
        no_pipeline: Why there are no blocks; empty if there are.
        rows: Rows of the example batch; None without one.
        itemsize: Bytes of the largest parameter's element.
        output_bytes: What the model returns for one row.
        tokens: Of one row; 1 without a sequence.
        observed: Whether flops and bytes were observed or follow from parameters.
        returns_loss: Whether forward was seen to return a scalar, as accumulation needs.
        head_modules: Modules that run before the blocks although they are defined behind.
        tail_modules: Modules that run behind the blocks although they are defined before.
        block_calls: As a plan says in which order blocks are called; empty if once each in order.
        called_behind: As a plan says behind which blocks modules outside of them are called.
        assumptions: Sentences that say what was assumed.
        experts: Modules with experts, which ranks may share out.
    """

    before: Part
    blocks: tuple[Part, ...]
    after: Part
    tied: tuple[ParameterSize, ...]
    block_names: tuple[str, ...]
    no_pipeline: str
    rows: int | None
    itemsize: int
    output_bytes: float
    tokens: int
    observed: bool
    head_modules: tuple[str, ...]
    tail_modules: tuple[str, ...]
    assumptions: tuple[str, ...]
    returns_loss: bool = False
    block_calls: tuple[str, ...] = ()
    called_behind: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict["str", "tuple[str, ...]"]
    )
    experts: tuple[ExpertLayer, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts in order."""
        return (self.before, *self.blocks, self.after)

    @property
    def flops(self) -> float:
        """Of one row's forward."""
        return sum(part.flops for part in self.parts)


def computed_in(workload: Workload, itemsize: int) -> Workload:
    """Return what a model does whose compute is in another dtype than its parameters.

    Activations are as wide as compute is. What the part behind the blocks keeps stays as wide as
    it was: losses are computed in float32 whatever the dtype of logits.
    """
    if itemsize == workload.itemsize:
        return workload
    factor = itemsize / workload.itemsize

    def part(each: Part, *, is_last: bool = False) -> Part:
        return replace(
            each,
            saved_bytes=each.saved_bytes * (1.0 if is_last else factor),
            output_bytes=each.output_bytes * factor,
            input_bytes=each.input_bytes * factor,
            keys_bytes=each.keys_bytes * factor,
            sent_bytes=each.sent_bytes * factor,
            norm_bytes=tuple((fqn, nbytes * factor) for fqn, nbytes in each.norm_bytes),
            widest_bytes=each.widest_bytes * factor,
            products_bytes=each.products_bytes * factor,
        )

    return replace(
        workload,
        before=part(workload.before),
        blocks=tuple(map(part, workload.blocks)),
        after=part(workload.after, is_last=True),
        output_bytes=workload.output_bytes * factor,
    )


def _refuse_lazy(model: nn.Module) -> None:
    lazy = [fqn for fqn, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"expected parameters that have a shape, got a lazy one, {lazy[0]!r} "
            "(nn.LazyLinear, ..); run the model once, then plan it"
        )


def workload_of(model: nn.Module, example_batch: Any, block_calls: Sequence[str] = ()) -> Workload:
    """Observe a model, or estimate from its parameters if that is not possible.

    Raises:
        ValueError: If parameters have no shape yet.
    """
    _refuse_lazy(model)
    few = _few_tokens_for(model, example_batch)
    said, called_behind = observed_calls(model, few, block_calls)
    blocks, block_names, no_pipeline = _blocks(model, said)
    notes: list[str] = []
    try:
        observation = observe(model, example_batch, blocks, fused_attention=True)
    except ObservationError as error:
        observation = observe(model, None, blocks)
        notes.append(f"the example batch could not be run without memory ({error})")
    if not observation.ran:
        if example_batch is None:
            notes.append("no example_batch was given")
        notes.append(
            "flops are 2 a token and matrix element, activations those of a transformer "
            f"(17 hidden vectors a token and block), with {ASSUMED_TOKENS} tokens a row"
        )
        notes.append("modules outside the blocks run in the order they were registered")
    layers = called_as_experts(expert_layers(model, blocks), observation)
    behind = _behind(model, blocks, observation)
    owned, tied = ownership(model, blocks, behind, counts_of(layers))
    largest = max(model.parameters(), key=lambda p: p.numel(), default=None)
    itemsize = 4 if largest is None else largest.element_size()
    if observation.ran:
        before, inner, after = observed_parts(observation, owned, itemsize)
        notes.append(_order_note(observation))
        notes.append(_uncounted_note(observation))
        parts = observed_exchanges((before, *inner, after), blocks, layers, observation, itemsize)
        once, tokens = _products_once(model), observation.tokens / max(1, observation.rows)
        parts[1:-1] = [with_attention(each, once, tokens) for each in parts[1:-1]]
    else:
        chosen, note = chosen_of(model) if layers else (1, "")
        notes.append(note)
        before, inner, after = estimated_parts(owned, tied, model, chosen)
        parts = estimated_exchanges((before, *inner, after), layers, chosen)
    before, *inner, after = parts
    rows = max(1, observation.rows)
    return Workload(
        before=before,
        blocks=tuple(inner),
        after=after,
        tied=tied,
        block_names=block_names,
        no_pipeline=no_pipeline,
        rows=rows if observation.ran else None,
        itemsize=itemsize,
        output_bytes=observation.output_bytes / rows if observation.ran else after.output_bytes,
        tokens=observation.tokens // rows if observation.ran else ASSUMED_TOKENS,
        observed=observation.ran,
        head_modules=_moved(model, blocks, observation, "after", "before"),
        tail_modules=_moved(model, blocks, observation, "before", "after"),
        block_calls=said,
        called_behind=called_behind,
        assumptions=tuple(note for note in notes if note),
        returns_loss=bool(observation.modules) and () in observation.modules[0].outputs,
        experts=layers,
    )


def _uncounted_note(seen: Observation) -> str:
    """Say of which operators nobody knows the flops, so that nobody trusts a time without them."""
    if not seen.uncounted:
        return ""
    return (
        f"flops lack those of {', '.join(seen.uncounted)}, for which there is no rule: the "
        "predicted time is too short by what they take"
    )


def _products_once(model: nn.Module) -> frozenset[str]:
    """Return the matrices that every token is multiplied by once, as far as classes tell.

    Convolutions use a weight at many places, and experts are not asked by every token.
    """
    return frozenset(
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 2
    )


def _blocks(
    model: nn.Module, said: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the block of every call, the names of the calls, and why there is none."""
    plan = with_constraints(ParallelPlan(), {"pipeline_parallel.block_calls": said})
    try:
        return called_blocks(plan, model), names_of_calls(plan, model), ""
    except ValueError as error:
        if said:
            raise
        return (), (), str(error)


def _behind(model: nn.Module, blocks: tuple[str, ...], observation: Observation) -> set[str]:
    """Return the modules that own parameters and run behind the last block."""
    if observation.ran:
        return {each.fqn for each in observation.outside if each.position == "after"}
    names = [name for name, _ in model.named_modules()]
    if not blocks:
        return set()
    holder = names.index(blocks[0])
    registered_later = names[holder:]
    return {name for name in registered_later if not _is_inside(name, blocks)}


def _moved(
    model: nn.Module, blocks: tuple[str, ...], observation: Observation, defined: str, runs: str
) -> tuple[str, ...]:
    """Return the modules that are defined on one side of the blocks and run on the other."""
    if not blocks:
        return ()
    positions = {
        name: {
            each.position
            for each in observation.outside
            if each.fqn == name or each.fqn.startswith(f"{name}.")
        }
        for name, where in modules_outside_blocks(model, blocks).items()
        if where == defined
    }
    return tuple(name for name, seen in positions.items() if seen == {runs})


def _is_inside(name: str, blocks: Iterable[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def _order_note(seen: Observation) -> str:
    after = [each.fqn for each in seen.outside if each.position == "after"]
    before = [each.fqn for each in seen.outside if each.position == "before"]
    if not seen.blocks:
        return ""
    return (
        f"observed order: {', '.join(before) or 'nothing'} before the {len(seen.blocks)} blocks, "
        f"{', '.join(after) or 'nothing'} behind them"
    )


def itemsize_of(dtype: str | None, default: int) -> int:
    """Return the bytes of an element of a dtype by name."""
    return default if dtype is None else getattr(torch, dtype).itemsize


# Bytes of logits above which less of the example is run with memory, and tokens of it then.
_LARGE_OUTPUT, _FEW_TOKENS = 2**26, 64


def few_tokens(batch: Any, workload: Workload) -> Any:
    """Return an example for code that is run on values: its first tokens if logits are large.

    Which modules are called, and when, is asked of them, not how long sequences are.
    """
    if workload.output_bytes * (workload.rows or 1) <= _LARGE_OUTPUT:
        return batch
    return _first_tokens(batch, workload.tokens)


def _few_tokens_for(model: nn.Module, batch: Any) -> Any:
    """Return the same before a model was observed: its widest matrix may make logits."""
    ids = max((x for x in _tensors(batch) if x.dim() == 2), key=torch.Tensor.numel, default=None)
    widest = max((p.shape[0] for p in model.parameters() if p.dim() == 2), default=0)
    if ids is None or 4 * ids.numel() * widest <= _LARGE_OUTPUT:
        return batch
    return _first_tokens(batch, ids.shape[1])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case dict():
            for each in cast("dict[Any, Any]", value).values():
                yield from _tensors(each)
        case tuple() | list():
            for each in cast("list[Any]", value):
                yield from _tensors(each)
        case _:
            pass


def _first_tokens(batch: Any, tokens: int) -> Any:
    """Cut tensors of two dims, the second of which are all tokens."""
    if tokens <= _FEW_TOKENS:
        return batch

    def first(value: Any) -> Any:
        match value:
            case torch.Tensor() if value.dim() == 2 and value.shape[1] == tokens:
                return value[:, :_FEW_TOKENS]
            case dict():
                given = cast("dict[Any, Any]", value)
                return {name: first(each) for name, each in given.items()}
            case tuple() | list():
                return [first(each) for each in cast("list[Any]", value)]
            case _:
                return value

    found = first(batch)
    return tuple(found) if isinstance(batch, tuple) else found

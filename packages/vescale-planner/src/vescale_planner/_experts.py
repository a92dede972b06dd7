"""Experts as the planner sees them: their parameters, and what is sent to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from vescale_parallel import ExpertLayer, Observation

from ._parts import ASSUMED_TOKENS, Part

# As configurations call the number of experts that a token is sent to.
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k",
    "num_selected_experts",
)  # fmt: skip
_ASSUMED_CHOSEN = 2
_NUM_INPUTS = 3  # rows, the experts of each, their weights
EVEN_EXPERTS = "all experts get as many tokens; ranks whose experts get more make others wait"


def counts_of(layers: Sequence[ExpertLayer]) -> dict[str, int]:
    """Return, of each parameter of an expert, among how many experts it is."""
    return {fqn: layer.num_experts for layer in layers for fqn in layer.parameters}


def called_as_experts(layers: Sequence[ExpertLayer], seen: Observation) -> tuple[ExpertLayer, ...]:
    """Return the layers but those of stacks that were seen to be called with something else.

    A codebook is a stack, too, and its forward may take a mask and a temperature besides.
    """
    otherwise = {call.fqn for call in seen.modules if len(call.inputs) != _NUM_INPUTS}
    return tuple(each for each in layers if each.is_listed or each.fqn not in otherwise)


def chosen_of(model: nn.Module) -> tuple[int, str]:
    """Return how many experts a token is sent to, by the model's configuration; a note if not."""
    config: Any = getattr(model, "config", None)
    for each in (getattr(config, "text_config", None), config):
        named = (getattr(each, name, None) for name in _CHOSEN)
        found = next((n for n in named if isinstance(n, int) and not isinstance(n, bool)), None)
        if found:
            return found, ""
    return _ASSUMED_CHOSEN, (
        f"every token is sent to {_ASSUMED_CHOSEN} experts: the model has no configuration that "
        "says to how many, and no example batch was observed"
    )


def observed_exchanges(
    parts: Sequence[Part],
    blocks: Sequence[str],
    layers: Sequence[ExpertLayer],
    seen: Observation,
    itemsize: int,
) -> list[Part]:
    """Return the parts with the rows that their experts were seen to be called with.

    A stack is called with rows, and the experts of each: a row is sent once for each of them.
    Experts of a list are called with their rows.
    """
    rows = max(1, seen.rows)
    nbytes: dict[str, float] = {layer.fqn: 0.0 for layer in layers}
    routed: dict[str, float] = dict(nbytes)
    home = {fqn: layer for layer in layers for fqn in layer.called}
    for call in seen.modules:
        layer = home.get(call.fqn)
        if layer is None or not call.inputs:
            continue
        width = call.inputs[0][-1] if call.inputs[0] else 1
        pairs = call.inputs[0][:-1] if layer.is_listed else call.inputs[1]
        nbytes[layer.fqn] += math.prod(pairs) * width * itemsize
        routed[layer.fqn] += math.prod(pairs)
    calls = {block: blocks.count(block) for block in blocks}

    def with_exchanges(index: int, part: Part) -> Part:
        inside = _layers_of(part, layers)
        times = calls.get(blocks[index - 1], 1) if 0 < index <= len(blocks) else 1
        sent = sum(nbytes[layer.fqn] for layer in inside) / times / rows
        called = sum(routed[layer.fqn] for layer in inside) / times / rows / max(1, len(inside))
        return replace(part, sent_bytes=sent, num_exchanges=len(inside), routed_rows=called)

    return [with_exchanges(index, part) for index, part in enumerate(parts)]


def estimated_exchanges(
    parts: Sequence[Part], layers: Sequence[ExpertLayer], chosen: int
) -> list[Part]:
    """Return the parts with what they send if all tokens go to as many experts."""

    def with_exchanges(part: Part) -> Part:
        count = len(_layers_of(part, layers))
        sent, routed = count * chosen * part.output_bytes, chosen * ASSUMED_TOKENS
        return replace(
            part, sent_bytes=sent, num_exchanges=count, routed_rows=routed if count else 0.0
        )

    return [with_exchanges(part) for part in parts]


def _layers_of(part: Part, layers: Sequence[ExpertLayer]) -> list[ExpertLayer]:
    """Return the layers whose experts a part has."""
    owned = {parameter.fqn for parameter in part.parameters if parameter.num_experts}
    return [layer for layer in layers if layer.parameters[0] in owned]


def even_sizes(layers: Sequence[ExpertLayer], ranks: int) -> list[int]:
    """Return by how many of some ranks all experts can be shared out evenly, 1 first."""
    if not layers:
        return [1]
    most = math.gcd(ranks, *(layer.num_experts for layer in layers))
    return [size for size in range(1, most + 1) if most % size == 0]

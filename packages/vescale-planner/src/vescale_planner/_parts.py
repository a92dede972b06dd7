"""The parts of a model that the planner prices: what each computes, keeps and hands on."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from torch import nn

from vescale_parallel import Observation

# Without an example batch: tokens of one row.
ASSUMED_TOKENS = 2048


@dataclass(frozen=True)
class ParameterSize:
    """One parameter: its name, what it takes, and the shorter and the longer side of a matrix.

    ``num_experts`` is among how many experts it is, or of how many it has a part; 0 of no expert.
    ``is_trained`` is whether it requires a gradient.
    """

    fqn: str
    numel: int
    nbytes: int
    width: int = 0
    length: int = 0
    num_experts: int = 0
    is_trained: bool = True

    def elsewhere(self, ranks: int) -> float:
        """Return which part of it other ranks have, of those that share experts: of the fullest.

        Each of ``ranks`` has as many experts, or one more where they do not divide.
        """
        if not self.num_experts:
            return 0.0
        return 1 - -(-self.num_experts // ranks) / self.num_experts


# Parameters of what runs before the blocks, of each block, and of what runs behind them.
Owned = list[tuple[ParameterSize, ...]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A consecutive part of the model, for one row of the batch.

    Attributes:
        parameters: What it owns; a tied one is owned where it is first used.
        flops: Of its forward.
        attention_flops: Of those, the ones without a parameter: attention's scores.
        saved_bytes: Kept for its backward.
        output_bytes: What it hands to the next part.
        input_bytes: What it is handed, of the part behind the blocks.
        keys_bytes: Of attention's keys and values together, of a block.
        sent_bytes: Rows for experts, as many a token as it has experts: where ranks share
            experts, they are sent to those, and as many back.
        num_exchanges: Modules with experts, each of which sends its rows.
        routed_rows: Rows that the experts of one of these modules are called with, together.
        norm_bytes: What its modules are called with that multiply nothing and return as much:
            name and bytes. Where such a norm needs features that are cut, they are gathered.
        widest_bytes: The largest tensor that one of its modules returns, of a block.
        products_bytes: What its modules return that multiply or attend, of a block.
    """

    parameters: tuple[ParameterSize, ...] = ()
    flops: float = 0.0
    attention_flops: float = 0.0
    saved_bytes: float = 0.0
    output_bytes: float = 0.0
    input_bytes: float = 0.0
    keys_bytes: float = 0.0
    sent_bytes: float = 0.0
    num_exchanges: int = 0
    routed_rows: float = 0.0
    norm_bytes: tuple[tuple[str, float], ...] = ()
    widest_bytes: float = 0.0
    products_bytes: float = 0.0

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of its parameters: calls of one block share them."""
        return tuple(parameter.fqn for parameter in self.parameters)

    @cached_property
    def numel(self) -> int:
        """Parameter elements."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def nbytes(self) -> int:
        """Parameter bytes."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @cached_property
    def trained(self) -> tuple[ParameterSize, ...]:
        """Those of its parameters that require a gradient."""
        return tuple(each for each in self.parameters if each.is_trained)

    def trained_share(self, *, of_experts: bool) -> float:
        """Return which part of its matrices' elements is trained; 1 of none."""
        matrices = [p for p in self.parameters if p.width and bool(p.num_experts) == of_experts]
        numel = sum(each.numel for each in matrices)
        return sum(p.numel for p in matrices if p.is_trained) / numel if numel else 1.0

    @cached_property
    def width(self) -> float:
        """The shorter sides of its matrices, weighted by their elements; 0 of none.

        Those of experts are not among them.
        """
        return _mean_width([each for each in self.parameters if not each.num_experts])

    def expert_width(self, tp: int) -> float:
        """The shorter sides of its experts' matrices, the sides that are no hidden state cut."""
        matrices = [each for each in self.experts if each.width]
        numel = sum(each.numel for each in matrices)
        if not numel:
            return 0.0
        shorter = (each.numel * min(self._sides_of_expert(each, tp)) for each in matrices)
        return sum(shorter) / numel

    def _sides_of_expert(self, matrix: ParameterSize, tp: int) -> tuple[float, float]:
        is_wide = matrix.width == self.hidden
        return (
            (matrix.width, matrix.length / tp) if is_wide else (matrix.width / tp, matrix.length)
        )

    @cached_property
    def hidden(self) -> int:
        """The side that most of its matrices outside of experts have."""
        outside = [each for each in self.parameters if each.width and not each.num_experts]
        sides = Counter(side for each in outside for side in {each.width, each.length})
        return max(sides, key=lambda side: (sides[side], side), default=0)

    @cached_property
    def experts(self) -> tuple[ParameterSize, ...]:
        """Those of its parameters that are of experts."""
        return tuple(each for each in self.parameters if each.num_experts)

    @cached_property
    def expert_flops(self) -> float:
        """Of ``flops``, those of experts: two a row and element of a matrix."""
        of_row = sum(each.numel / each.num_experts for each in self.experts if each.width)
        return min(2.0 * of_row * self.routed_rows, self.flops - self.attention_flops)

    @cached_property
    def rows_of_expert(self) -> float:
        """Rows that one expert is called with, if all get as many."""
        return self.routed_rows / max((each.num_experts for each in self.experts), default=1)


def _mean_width(parameters: Sequence[ParameterSize]) -> float:
    matrices = [each for each in parameters if each.width]
    numel = sum(each.numel for each in matrices)
    return sum(each.numel * each.width for each in matrices) / numel if numel else 0.0


def ownership(
    model: nn.Module,
    blocks: tuple[str, ...],
    behind: set[str],
    experts: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Owned, tuple[ParameterSize, ...]]:
    """Return the parameters of every part, and the tied ones used before and behind.

    ``experts`` are the parameters of experts, each with the number of these.
    """
    index = {block: blocks.index(block) + 1 for block in blocks}  # of the first call
    parts: list[list[ParameterSize]] = [[] for _ in range(len(blocks) + 2)]
    homes: dict[int, int] = {}
    tied: list[ParameterSize] = []
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        home = next((i for b, i in index.items() if fqn.startswith(f"{b}.")), None)
        if home is None:
            home = len(parts) - 1 if fqn.rpartition(".")[0] in behind else 0
        nbytes = parameter.numel() * parameter.element_size()
        width, length = sorted(parameter.shape[-2:]) if parameter.dim() > 1 else (0, 0)
        among = experts.get(fqn, 0)
        sized = ParameterSize(
            fqn, parameter.numel(), nbytes, width, length, among, parameter.requires_grad
        )
        if id(parameter) not in homes:
            homes[id(parameter)] = home
            parts[home].append(sized)
        elif homes[id(parameter)] != home:
            tied.append(sized)
    for position, block in enumerate(blocks):
        if index[block] != position + 1:
            parts[position + 1] = parts[index[block]]
    return [tuple(part) for part in parts], tuple(tied)


def observed_parts(
    seen: Observation, owned: Owned, itemsize: int
) -> tuple[Part, tuple[Part, ...], Part]:
    """Divide an observation by its rows; ``itemsize`` is that of activations."""
    rows = max(1, seen.rows)
    width = seen.blocks[0].output_bytes / rows if seen.blocks else 0.0
    norms, widest = _norm_bytes(seen, itemsize), _widest_bytes(seen, itemsize)
    products = _products_bytes(seen, itemsize)
    before = Part(
        parameters=owned[0],
        flops=seen.before_flops / rows,
        saved_bytes=seen.before_saved_bytes / rows,
        output_bytes=width,
    )
    blocks = tuple(
        Part(
            parameters=parameters,
            flops=block.flops / rows,
            saved_bytes=block.saved_bytes / rows,
            output_bytes=block.output_bytes / rows,
            keys_bytes=keys_share(parameters) * block.output_bytes / rows,
            norm_bytes=norms.get(block.fqn, ()),
            widest_bytes=widest[block.fqn],
            products_bytes=products[block.fqn],
        )
        for parameters, block in zip(owned[1:-1], seen.blocks, strict=True)
    )
    after = Part(
        parameters=owned[-1],
        flops=seen.after_flops / rows,
        saved_bytes=seen.after_saved_bytes / rows,
        output_bytes=seen.output_bytes / rows,
        input_bytes=seen.blocks[-1].output_bytes / rows if seen.blocks else 0.0,
    )
    return before, blocks, after


def _norm_bytes(seen: Observation, itemsize: int) -> dict[str, tuple[tuple[str, float], ...]]:
    """Return, for each block, what modules like norms in it were called with, for one row.

    Of a norm with a gate that is one and a half times as much: both are gathered in forward, and
    one gradient in backward.
    """
    found: dict[str, dict[str, float]] = {block.fqn: {} for block in seen.blocks}
    for call in seen.modules:
        if call.flops or len(call.outputs) != 1 or {*call.inputs} != {*call.outputs}:
            continue
        block = _block_of(call.fqn, found)
        if block is not None:
            nbytes = math.prod(call.outputs[0]) * itemsize / max(1, seen.rows)
            nbytes *= (len(call.inputs) + 1) / 2
            found[block].setdefault(call.fqn, nbytes)
    return {block: tuple(norms.items()) for block, norms in found.items()}


def _widest_bytes(seen: Observation, itemsize: int) -> dict[str, float]:
    """Return, for each block, the largest tensor that a module in it returned, for one row."""
    found = {block.fqn: 0.0 for block in seen.blocks}
    for call in seen.modules:
        block = _block_of(call.fqn, found)
        if block is not None:
            numel = max((math.prod(shape) for shape in call.outputs), default=0)
            found[block] = max(found[block], numel * itemsize / max(1, seen.rows))
    return found


def _products_bytes(seen: Observation, itemsize: int) -> dict[str, float]:
    """Return, for each block, what modules in it return that compute products themselves.

    Attention is one of them, and returns as much as what it attends to its layer's output.
    """
    own = Counter[str]()
    for call in seen.modules:
        own[call.fqn] += call.flops
    for fqn, flops in [*own.items()]:
        holder = fqn.rpartition(".")[0]
        while holder and holder not in own:  # a list, which is not called
            holder = holder.rpartition(".")[0]
        own[holder] -= flops
    found = {block.fqn: 0.0 for block in seen.blocks}
    for call in seen.modules:
        block = _block_of(call.fqn, found)
        if block is not None and own[call.fqn] > 0:
            numel = sum(map(math.prod, call.outputs[:1]))
            found[block] += numel * itemsize / max(1, seen.rows)
    return found


def _block_of(fqn: str, blocks: Container[str]) -> str | None:
    holders = itertools.accumulate(fqn.split("."), "{}.{}".format)
    return next((holder for holder in holders if holder in blocks), None)


def with_attention(part: Part, once: frozenset[str], tokens: float) -> Part:
    """Return a block with the flops of attention: what it computes beside its matrices.

    Of a matrix in ``once`` that is two flops a token and element, of experts as many a row that
    they are called with. A block that has more than these is not divided.
    """
    outside = [each for each in part.parameters if not each.num_experts]
    products = sum(each.numel for each in outside if each.fqn in once)
    others = sum(each.numel for each in outside if each.fqn not in once)
    if tokens <= 1 or others > 0.1 * products:
        return part
    rest = part.flops - 2.0 * products * tokens - part.expert_flops
    return replace(part, attention_flops=max(0.0, rest))


def keys_share(parameters: tuple[ParameterSize, ...]) -> float:
    """Return how wide keys and values together are, of the hidden state.

    Twice as wide, unless queries share them: of a block's matrices, just two have the narrowest
    shape that is there twice, and one of their sides is the hidden state's.
    """
    shapes = Counter((p.width, p.numel) for p in parameters if p.width)
    hidden = max((width for width, _ in shapes), default=0)
    pairs = [width for (width, numel), n in shapes.items() if n == 2 and numel == width * hidden]
    return 2.0 * min(pairs, default=hidden) / hidden if hidden else 2.0


def estimated_parts(
    owned: Owned,
    tied: tuple[ParameterSize, ...],
    model: nn.Module,
    chosen: int = 1,
) -> tuple[Part, tuple[Part, ...], Part]:
    """Estimate from parameters alone.

    A transformer block of width h has about 12 h^2 elements, and keeps 34 h bytes a token at
    2 bytes an element (Korthikanti et al. 2022, without attention scores). Of experts only those
    count that a token is sent to, ``chosen`` many.
    """
    matrices = {
        name: p for name, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1
    }
    lookups = {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }

    def part(parameters: tuple[ParameterSize, ...], *, vectors: int) -> Part:
        used = [p for p in parameters if p.fqn in matrices and p.fqn not in lookups and p.numel]
        numel = sum(p.numel * _share_of_tokens(p, chosen) for p in used)
        itemsize = used[0].nbytes / used[0].numel if used else 4.0
        width = (numel / 12) ** 0.5 * itemsize
        return Part(
            parameters=parameters,
            flops=2.0 * numel * ASSUMED_TOKENS,
            saved_bytes=vectors * width * ASSUMED_TOKENS,
            output_bytes=width * ASSUMED_TOKENS,
            keys_bytes=keys_share(parameters) * width * ASSUMED_TOKENS,
            widest_bytes=4 * width * ASSUMED_TOKENS,
            # Four matrices of attention, what it attends, and the MLP's two.
            products_bytes=10 * width * ASSUMED_TOKENS,
        )

    before = part(owned[0], vectors=0 if len(owned) > 2 else 17)
    blocks = tuple(part(parameters, vectors=17) for parameters in owned[1:-1])
    # Logits once as they are and once in float32 for the loss; their width is the vocabulary.
    heads = [matrices[p.fqn] for p in (*owned[-1], *tied) if p.fqn in matrices]
    logits = float(max((p.shape[0] for p in heads), default=0)) * ASSUMED_TOKENS
    tied_flops = 2.0 * sum(p.numel for p in tied) * ASSUMED_TOKENS
    after = part(owned[-1], vectors=0)
    after = Part(
        parameters=after.parameters,
        flops=after.flops + tied_flops,
        saved_bytes=8.0 * logits,
        output_bytes=4.0 * logits,
        input_bytes=blocks[-1].output_bytes if blocks else 0.0,
    )
    return before, blocks, after


def _share_of_tokens(parameter: ParameterSize, chosen: int) -> float:
    """Return which part of all tokens comes to a parameter, with as many to each expert."""
    return min(1.0, chosen / parameter.num_experts) if parameter.num_experts else 1.0

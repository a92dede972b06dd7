"""The ways in which a region may be put around layers that are sharded together."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.code import names_of_class
from vescale_parallel._model.fqns import generalize, matching
from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._tensor_parallel.chunks import parts_of

from .candidate import Group
from .integers_read import integers_read


def border_options(model: nn.Module, group: Group) -> Iterator[dict[str, str]]:
    """Yield marks of a region's collectives: around its layers, then around what holds them.

    Last around layers that get more than one activation, as experts get the weights of a router:
    what holds them may be another module in other blocks.
    """
    plain = [p for p in (*group.entries, *group.exits) if not is_linear(model, p)]
    yield {
        **{f"{p}.<enter>": "Replicate()" for p in group.entries if p in plain},
        **{f"{p}.<leave>": "Replicate()" for p in group.exits if p in plain},
    }
    leaves = {f"{p}.<leave>": "Replicate()" for p in group.exits if p in plain}
    for entrance in entrances(model, holder_of(model, group.entries), "Replicate()"):
        yield entrance | leaves
    first = {f"{p}.<enter>": "Replicate()" for p in group.entries if p in plain}
    others = [(p, name) for p in group.entries if p in plain for name in _others(model, p)]
    weights = [(p, name) for p, name in others if name.endswith("weights")]
    for given in (weights, others) if weights != others else (others,):
        if given:
            yield first | {f"{p}.<enter:{name}>": "Replicate()" for p, name in given} | leaves


def _others(model: nn.Module, pattern: str) -> list[str]:
    """Return the arguments of a module beside its first activation."""
    names = matching(pattern, [fqn for fqn, _ in model.named_modules()])
    signature = inspect.signature(model.get_submodule(names[0]).forward)
    return [
        name
        for name, each in list(signature.parameters.items())[1:]
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]


def is_linear(model: nn.Module, pattern: str) -> bool:
    modules = matching(pattern, [fqn for fqn, _ in model.named_modules()])
    return bool(modules) and linear_kind(model.get_submodule(modules[0])) is not None


def holder_of(model: nn.Module, patterns: Sequence[str]) -> str:
    """Return the deepest module that holds all of some modules, empty if it is the block."""
    holder = _common(model, patterns)
    return "" if holder.endswith("*") else holder


def _common(model: nn.Module, patterns: Sequence[str]) -> str:
    """Return the pattern of the deepest module with a forward that holds all of some modules."""
    split = [pattern.split(".") for pattern in patterns]
    common = [parts[0] for parts in zip(*split, strict=False) if len(set(parts)) == 1]
    holder = ".".join(common[:-1] if len(patterns) == 1 else common)
    while any(isinstance(each, _LISTS) for each in _matching_modules(model, holder)):
        holder = holder.rpartition(".")[0]
    return holder


_LISTS = nn.ModuleList, nn.ModuleDict  # whose owner calls what is in them


def _matching_modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    names = matching(pattern, _names(model)) if pattern else []
    return [model.get_submodule(name) for name in names]


def entrances(model: nn.Module, holder: str, arrives: str) -> Iterator[dict[str, str]]:
    """Yield the marks of what enters a module: the first activation, then others, too."""
    names = matching(holder, [fqn for fqn, _ in model.named_modules()]) if holder else []
    if not names:
        return
    first = {f"{holder}.<enter>": arrives}
    yield first
    arguments = list(inspect.signature(model.get_submodule(names[0]).forward).parameters)
    # What comes from outside the block is whole, whatever runs through the blocks.
    others = [n for n in arguments[1:] if n.endswith("states") or n in ("key", "value")]
    if others:
        yield first | {f"{holder}.<enter:{name}>": "Replicate()" for name in others}


def attribute_options(model: nn.Module, group: Group, size: int) -> list[dict[str, str]]:
    """Return sets of integers that may have to be divided, fewest first.

    Those that modules have, then likewise with those of configurations that they read, then with
    the shape of what the module is called with.
    """
    holder = _common(model, (*group.entries, *group.exits))
    holders = _holders(model, group, holder)
    if not holders:
        return [{}]
    widths, lengths = _widths(model, group), _lengths_read(model, group, holder)
    packing = [p for p, each in group.parameters.items() if isinstance(each, InterleavedShard)]
    packed = _lengths_of(model, group, holder, packing)
    own, held = (_Countable(widths, size, lengths, packed) for _ in range(2))
    ratios: set[str] = set()
    for fqn, module in model.get_submodule(holders[0]).named_modules():
        if linear_kind(module) is not None:
            continue
        below = generalize(fqn)
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            if group.num_shared and value == group.ratio and "group" in name:
                ratios.add(f"{below}.<attr:{name}>")
            else:
                own.add(below, name, value)
        for name, value in integers_read(module):
            held.add(below, name, value)
    options = [dict(marks) for marks in own.options()]
    others = [dict(marks) for marks in held.options() if marks]
    options += [{**one, **other} for other in others for one in options]
    if ratios:
        parts = dict.fromkeys(ratios, f"Shard(0) of {size // group.num_shared}")
        options = [{**parts, **option} for option in options] + options
    owners = [holder] if len(matching(holder, _names(model))) == len(holders) else holders
    if _reads_shapes(model.get_submodule(holders[0])):
        options += [{**option, ".<shape>": "Shard(-1)"} for option in options]
    made = [
        {f"{owner}.{mark.lstrip('.')}": text for owner in owners for mark, text in option.items()}
        for option in options
    ]
    return [option for index, option in enumerate(made) if option not in made[:index]]


def _reads_shapes(module: nn.Module) -> bool:
    """Whether a module's code asks tensors how long they are: [Note: shapes of shards]."""
    return bool(names_of_class(type(module)) & {"shape", "size"})


def _names(model: nn.Module) -> list[str]:
    return [fqn for fqn, _ in model.named_modules()]


def _holders(model: nn.Module, group: Group, holder: str) -> list[str]:
    """Return the modules that hold a group's layers, of which there is a pattern.

    Others that the pattern matches hold other layers, where blocks of several kinds alternate. Not
    all hold each of the layers: the last block of two streams of tokens ends one of them.
    """
    names, depth = _names(model), holder.count(".") + 1
    ends = [
        {".".join(fqn.split(".")[:depth]) for each in patterns for fqn in matching(each, names)}
        for patterns in (group.entries, group.exits)
        if patterns
    ]
    found = matching(holder, names) if holder else []
    return [fqn for fqn in found if all(fqn in each for each in ends)]


# What their values may equal by chance, and counts no features.
_NO_WIDTHS = ("kernel", "state", "chunk")


def _counts_heads(name: str) -> bool:
    """Whether an integer may count heads: ``num_heads``, or ``h`` as papers have it."""
    return "head" in name or name in ("h", "nh", "n_h", "num_h")


class _Countable:
    """Integers that may count what is sharded: heads and groups by name, widths by their value.

    ``lengths`` are of parameters of which some parts are read whole, ``packed`` of all that pack
    parts.
    """

    def __init__(
        self, widths: set[int], size: int, lengths: Mapping[str, int], packed: Mapping[str, int]
    ) -> None:
        self._widths, self._size = widths, size
        self._lengths, self._packed = lengths, packed
        self._heads: list[tuple[str, str]] = []
        self._sizes: list[tuple[str, str]] = []
        self._groups: list[tuple[str, str]] = []

    def add(self, module: str, path: str, value: object) -> None:
        """Take an integer of a module, dotted if another object that the module holds has it."""
        if isinstance(value, list | tuple):
            self._add_parts(module, path, value)
        if type(value) is not int or value <= 0 or value % self._size:
            return
        name = path.rpartition(".")[2]
        mark = f"{module}.<attr:{path}>", "Shard(0)"
        of_heads, is_length = _counts_heads(name), "dim" in name or "size" in name
        is_of_one = (of_heads and "dim" in name) or ("group" in name and is_length)
        if value in self._widths and not (is_of_one or any(n in name for n in _NO_WIDTHS)):
            self._sizes.append(mark)
        elif (read := _as_long_below(module, value, self._lengths)) and not is_of_one:
            self._sizes.append((mark[0], f"Shard(0) of {read}"))
        elif of_heads and not is_length:
            self._heads.append(mark)
        elif "groups" in name and not is_length:
            self._groups.append(mark)

    def _add_parts(self, module: str, path: str, values: Sequence[object]) -> None:
        """Take the lengths in which code splits what a packed parameter makes."""
        lengths = [each for each in values if type(each) is int]
        if lengths and len(lengths) == len(values):
            packed = _as_long_below(module, sum(lengths), self._packed)
            if packed:
                self._sizes.append((f"{module}.<attr:{path}>", f"Shard(0) of {packed}"))

    def options(self) -> list[list[tuple[str, str]]]:
        heads, sizes = self._heads, self._sizes
        options = [[], heads, sizes, heads + sizes]
        grouped = [each + self._groups for each in options] if self._groups else []
        # Groups of queries are those of a head, which stay as many unless that head is read whole.
        return grouped + options if self._lengths else options + grouped


def _as_long_below(module: str, value: int, lengths: Mapping[str, int]) -> str:
    """Return a parameter as long as an integer, by its name from a module; "" if none is."""
    start = f"{module}." if module else ""
    names = (n for n, length in lengths.items() if length == value)
    return next((n.removeprefix(start) for n in names if n.startswith(start)), "")


def _lengths_read(model: nn.Module, group: Group, holder: str) -> dict[str, int]:
    """Return the lengths of parameters of which parts are read whole, by names from a module."""
    return _lengths_of(model, group, holder, [f"{fqn}.{name}" for fqn, name in group.reads])


def _lengths_of(
    model: nn.Module, group: Group, holder: str, patterns: Iterable[str]
) -> dict[str, int]:
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, int] = {}
    for pattern in patterns:
        dim = getattr(group.parameters.get(pattern), "dim", 0)
        for fqn in matching(pattern, names)[:1]:
            found[pattern.removeprefix(f"{holder}.")] = model.get_parameter(fqn).shape[dim]
    return found


def _widths(model: nn.Module, group: Group) -> set[int]:
    """Return the lengths that are sharded."""
    found: set[int] = set()
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    read = {f"{module}.{name}": parts for (module, name), parts in group.reads.items()}
    for pattern, placement in group.parameters.items():
        assert isinstance(placement, Shard | InterleavedShard)
        for fqn in matching(pattern, names)[:1]:
            length, parts = model.get_parameter(fqn).shape[placement.dim], parts_of(placement)
            lengths = parts if isinstance(parts, tuple) else (length // parts,) * parts
            if pattern in read:
                pairs = zip(lengths, read[pattern], strict=True)
                found |= {length for length, each in pairs if each != Replicate()}
            else:
                found |= {length, *lengths}
    return found

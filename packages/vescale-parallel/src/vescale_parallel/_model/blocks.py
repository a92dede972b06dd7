"""What a model is made of: its parameters, its repeated blocks, where to split between them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn


def numel_of(module: nn.Module) -> int:
    """Return the number of elements of a module's parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def alike_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return, of parameters of blocks by identity, those of a first block that are as they are.

    A copy with one parameter for all of them needs the memory of one block.
    """
    found: dict[int, nn.Parameter] = {}
    for stack in block_stacks(model):
        first: dict[tuple[str, tuple[int, ...]], nn.Parameter] = {}
        for fqn in stack:
            for name, parameter in model.get_submodule(fqn).named_parameters():
                of = first.setdefault((name, tuple(parameter.shape)), parameter)
                if of is not parameter:
                    found[id(parameter)] = of
    return found


def block_stacks(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the FQNs of the blocks of every outermost list of two or more of one class.

    A block is a child with parameters of an ``nn.ModuleList`` or ``nn.Sequential``.
    """
    return _lists(model, may_take_turns=False)


def sequence_stacks(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the FQNs of the blocks of every outermost stack that activations of sequences pass.

    They are those of :func:`block_stacks`. Where blocks are lists that nothing calls, of an
    attention and an MLP (``for attend, feed in layers``), or of several classes, the module that
    calls what is in them adds residuals in between: a stack of one block, if no others are in it.
    """
    called = [s for s in block_stacks(model) if is_called(model.get_submodule(s[0]))]
    alone = dict[str, None]()
    for stack in _lists(model, may_take_turns=True):
        around = name_of(stack)
        while around and not is_called(model.get_submodule(around)):
            around = around.rpartition(".")[0]
        if around and not any(s[0].startswith(f"{around}.") for s in called):
            alone[around] = None
    outer = [fqn for fqn in alone if not fqn.startswith(tuple(f"{each}." for each in alone))]
    return [*called, *((fqn,) for fqn in outer)]


def name_of(stack: Sequence[str]) -> str:
    """Return the name of a stack of blocks: of their list, or of a block that is alone."""
    return stack[0].rpartition(".")[0] if len(stack) > 1 else stack[0]


def _lists(model: nn.Module, *, may_take_turns: bool) -> list[tuple[str, ...]]:
    """Return the FQNs of the blocks of every outermost list of two or more.

    Blocks of an ``nn.ModuleList`` may be of several classes, each used more than once.
    """
    stacks: list[tuple[str, ...]] = []

    def visit(module: nn.Module, prefix: str) -> None:
        children = list(module.named_children())
        blocks = [
            (name, child) for name, child in children if any(True for _ in child.parameters())
        ]
        classes = Counter(type(child) for _, child in blocks)
        turns = may_take_turns and isinstance(module, nn.ModuleList)
        turns = turns and min(classes.values(), default=0) > 1
        repeated = len(blocks) > 1 and (len(classes) == 1 or turns)
        if isinstance(module, nn.ModuleList | nn.Sequential) and repeated:
            stacks.append(tuple(prefix + name for name, _ in blocks))
            return
        for name, child in children:
            visit(child, f"{prefix}{name}.")

    visit(model, "")
    return stacks


def pipeline_blocks(model: nn.Module, idle: Collection[str] = ()) -> tuple[str, ...]:
    """Return the FQNs of the blocks that a pipeline is split between, in order.

    They are those of all lists that matter, one list after the other as they are defined: of an
    encoder and a decoder, or of a vision tower and a language model. Of a block that is a list or
    dict of modules, which nothing calls, what is in it is a block.

    Args:
        model: The model.
        idle: Blocks that are not called: lists that begin with one are left out.

    Raises:
        ValueError: If there is no list of blocks, or a block with parameters that nothing calls.
    """
    stacks = _lists(model, may_take_turns=True)
    stacks = [stack for stack in stacks if not {stack[0], *_called(model, stack[0])} & {*idle}]
    if not stacks:
        raise ValueError(
            f"pipeline parallelism splits between the blocks of an nn.ModuleList or "
            f"nn.Sequential, and {type(model).__name__} has none of two or more blocks. One block "
            "that forward calls again and again, as ALBERT's, is split between its calls if these "
            "are known: from a dataset given to parallelize, an example_batch given to "
            "generate_plan, or pipeline_parallel.block_calls; else use pipeline_parallel.size 1"
        )
    sizes = [sum(numel_of(model.get_submodule(fqn)) for fqn in stack) for stack in stacks]
    large = [stack for stack, size in zip(stacks, sizes, strict=True) if 5 * size >= max(sizes)]
    # Lists of lists may hold a module in several of them.
    names: dict[nn.Module, str] = {}
    for fqn in (fqn for stack in large for fqn in stack):
        for called in _parts_of_block(model, fqn):
            names.setdefault(model.get_submodule(called), called)
    return tuple(names.values())


def _parts_of_block(model: nn.Module, fqn: str) -> list[str]:
    """Return a block, or what is called in it if nothing calls the block itself.

    A list of an attention and an MLP, whose residuals a loop adds (``for attend, feed in
    layers``), is two blocks: what crosses between them is seen, as between any others.
    """
    called, block = _called(model, fqn), model.get_submodule(fqn)
    if sum(numel_of(model.get_submodule(each)) for each in called) < numel_of(block):
        raise ValueError(
            f"pipeline parallelism splits between calls of blocks, and {fqn!r} is a "
            f"{type(block).__name__} with parameters of its own, which nothing calls; give it a "
            "forward, or use another parallelism"
        )
    return called


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Return the FQNs of the blocks of all stacks, in order.

    Of a block that is a list or dict of modules, which nothing calls, what is in it is a block.
    """
    stacks = block_stacks(model)
    return tuple(called for stack in stacks for fqn in stack for called in _called(model, fqn))


def _called(model: nn.Module, fqn: str) -> list[str]:
    module = model.get_submodule(fqn)
    if is_called(module):
        return [fqn]
    return [
        called
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
        for called in _called(model, f"{fqn}.{name}")
    ]


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; lists and dicts of modules or parameters have none."""
    return inspect.getattr_static(module, "forward") is not nn.Module.forward

"""What holds of all blocks of a model, where a smaller one with fewer of them was compared.

A large model of transformers is compared as a scaled-down one, which has a few blocks of every
kind. What was found of a block goes for all blocks of its kind in the same list: those with the
same modules, and with the same flags if there are such ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from vescale_parallel._cross_replica.context.attending import NotSlicedError
from vescale_parallel._cross_replica.context.leaving import Leaving
from vescale_parallel._cross_replica.context.shown import Shown
from vescale_parallel._cross_replica.context.slicing import Slicing
from vescale_parallel._model.blocks import name_of, sequence_stacks
from vescale_parallel._verify.calls.flags import flags_of

Stacks = Mapping[str, Sequence[str]]


def of_all_blocks(slicing: Slicing, few: nn.Module, model: nn.Module) -> Slicing:
    """Return the slicing of a model, by that of one with fewer blocks in the same lists.

    Raises:
        NotSlicedError: If a block is of a kind that was not compared.
    """
    alike = _Alike.of(few, model, slicing.stacks)
    behind, shown = slicing.behind, slicing.shown
    if behind.stack is not None:
        behind = replace(behind, block=alike.stacks[behind.stack][-1])
    return replace(
        slicing,
        attending=frozenset(alike.names(slicing.attending)),
        draws=alike.places(slicing.draws),
        in_attention={
            fqn: (where, index)
            for name, (other, index) in slicing.in_attention.items()
            for fqn, where in alike.of_each((name, other))
        },
        dims=alike.places(slicing.dims),
        drawn=alike.places(slicing.drawn),
        leaving=Leaving(
            alike.places(slicing.leaving.whole),
            alike.places(slicing.leaving.dims),
            alike.collected(slicing.leaving),
        ),
        behind=behind,
        unequal=frozenset(alike.names(slicing.unequal)),
        across={
            fqn: is_it for name, is_it in slicing.across.items() for fqn in alike.names([name])
        },
        shown=Shown(
            frozenset(alike.names(shown.modules)),
            frozenset(alike.names(shown.token_wise)),
            alike.places(shown.given),
            alike.places(shown.dims),
        ),
    )


@dataclass(frozen=True)
class _Alike:
    """Which blocks are like which ones of the smaller model.

    Attributes:
        stacks: The blocks of the model, by the names of their lists.
        like: Of the smaller model's blocks, those of the model that they stand for.
    """

    stacks: Stacks
    like: Mapping[str, Sequence[str]]

    @staticmethod
    def of(few: nn.Module, model: nn.Module, sliced: Iterable[str]) -> _Alike:
        mine, theirs = _stacks(model), _stacks(few)
        like: dict[str, list[str]] = {fqn: [] for stack in theirs.values() for fqn in stack}
        for name in sliced:
            for fqn in mine[name]:
                like[_compared_for(fqn, model, theirs[name], few)].append(fqn)
        return _Alike(mine, like)

    def of_each(self, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Yield the names of modules in one block as they are in all blocks like it."""
        block = next((each for each in self.like if f"{names[0]}.".startswith(f"{each}.")), None)
        if block is None:
            yield names
        for fqn in self.like.get(block or "", ()):
            yield tuple(fqn + name.removeprefix(block or "") for name in names)

    def names(self, fqns: Iterable[str]) -> Iterator[str]:
        for name in fqns:
            yield from (fqn for (fqn,) in self.of_each((name,)))

    def places(self, found: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return what is known by place, of which the first part is the name of a module."""
        return {
            (fqn, *rest): value
            for (name, *rest), value in found.items()
            for fqn in self.names([name])
        }

    def collected(self, leaving: Leaving) -> dict[tuple[str, int], tuple[int, bool]]:
        """Return where sequences are in what modules around blocks return of them.

        Raises:
            NotSlicedError: If they return other tensors, which cannot be told from these.
        """
        found: dict[tuple[str, int], tuple[int, bool]] = {}
        inside = tuple(f"{block}." for block in self.like)
        for (fqn, _, ndim), where in leaving.dims.items():
            if where is not None and not f"{fqn}.".startswith(inside):
                found[fqn, ndim] = where
        for (fqn, _, ndim), where in leaving.dims.items():
            is_told = where is None and not found.get((fqn, ndim), (0, False))[1]
            if not is_told and where != found.get((fqn, ndim), where):
                raise NotSlicedError(
                    f"{fqn!r} returns tensors of blocks, and others of {ndim} dims, which cannot "
                    "be told apart where a smaller model with fewer blocks is compared"
                )
        return found


def _stacks(model: nn.Module) -> Stacks:
    return {name_of(stack): stack for stack in sequence_stacks(model)}


def _compared_for(fqn: str, model: nn.Module, blocks: Sequence[str], few: nn.Module) -> str:
    """Return the block of the smaller model that was compared for one of the model.

    That of its name, or else the last one: the first one is called otherwise in some models.
    """
    block = model.get_submodule(fqn)
    order = [*(each for each in blocks if each == fqn), *reversed(blocks)]
    alike = [each for each in order if _kind(few.get_submodule(each)) == _kind(block)]
    if not alike:
        raise NotSlicedError(
            f"{fqn!r} is of a kind that the smaller model which was compared has no block of"
        )
    flags = flags_of(block)
    return next((x for x in alike if flags_of(few.get_submodule(x)) == flags), alike[0])


def _kind(block: nn.Module) -> tuple[tuple[str, str], ...]:
    return tuple((fqn, type(each).__name__) for fqn, each in block.named_modules())

"""Which blocks may compute on slices of a sequence, by what one forward of the whole does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass

from torch import Tensor, nn

from vescale_dtensor import package_logger
from vescale_parallel._model.blocks import name_of, sequence_stacks
from vescale_parallel._model.copies import discard, snapshot
from vescale_parallel._model.random_copies import InDouble, sharing_copy
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.region import Region

from .behind import Behind
from .draws import DrawKey, WholeDraw
from .leaving import Leaving
from .shown import shown_modules
from .slicing import Slicing
from .watch import ForwardWatch

_log = package_logger("vescale.parallel")


class NotSlicedError(ValueError):
    """A model computes something else on slices, or cannot be compared.

    Attributes:
        raised: What its code raised, to be said after what to do about it.
        where: The module whose code it is, as far as is known.
        is_whole: Whether that computes on whole sequences, though it was given slices.
    """

    def __init__(
        self, why: str, raised: str = "", where: str = "", *, is_whole: bool = False
    ) -> None:
        super().__init__(why)
        self.raised, self.where, self.is_whole = raised, where, is_whole


class NotRunError(NotSlicedError):
    """A model does not run on the rows that it is given."""


@dataclass(frozen=True)
class Attending:
    """What is known of where a model attends.

    Attributes:
        base: The model.
        watch: Of a forward of the whole of it.
    """

    base: nn.Module
    watch: ForwardWatch

    @staticmethod
    def of(region: Region, base: nn.Module) -> Attending:
        """Run a model whole.

        Raises:
            NotRunError: If it does not run.
        """
        watch = ForwardWatch()
        inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in region.inputs]
        args, kwargs = snapshot(pytree.tree_unflatten(inputs, region.spec))
        watched = sharing_copy(base)
        try:
            with InDouble():
                watch.run(watched, args, kwargs)
        # Arbitrary user code: whatever it raises means that it cannot be compared.
        except Exception as error:
            raise NotRunError(
                f"it cannot be compared with one device: {type(error).__name__}: {error}"
            ) from error
        finally:
            discard(watched)
        return Attending(base, watch)

    def slicing(self) -> Slicing:
        """Return the stacks in which all blocks attend, what does, and what is drawn.

        Raises:
            NotSlicedError: If there are none, or of a draw that cannot be told from another one.
        """
        watch = self.watch
        attend = (watch.attending | {*watch.multiplying}) - watch.given_none
        found = [stack for stack in sequence_stacks(self.base) if {*stack} <= attend]
        if not found:
            raise NotSlicedError(
                "found no list of two or more blocks that all attend, by "
                "F.scaled_dot_product_attention, transformers' attention interface, or a product "
                "of queries with keys, by which a rank attends to all of the sequence"
            )
        blocks = (block for stack in found for block in stack if block not in watch.attending)
        written = {fqn for block in blocks for fqn in watch.multiplying[block]}
        return self._slicing(frozenset(map(name_of, found)), written | watch.steered)

    def _slicing(self, stacks: frozenset[str], shown: Set[str]) -> Slicing:
        watch, inside = self.watch, tuple(f"{stack}." for stack in stacks)
        shown = {fqn for fqn in shown if f"{fqn}.".startswith(inside)}
        behind = watch.behind.behind(watch.steered)
        return Slicing(
            stacks,
            frozenset(fqn for fqn in watch.modules if f"{fqn}.".startswith(inside)),
            _draws(watch, stacks),
            {fqn: next(iter(at)) for fqn, at in watch.in_attention.items() if len(at) == 1},
            leaving=Leaving(watch.returned),
            behind=behind if behind.stack in stacks else Behind(),
            returned_at=watch.returned_at,
            last=watch.last if watch.num_passes[watch.last or ""] == 1 else None,
            unequal=frozenset(watch.unequal),
            shown=shown_modules(shown, watch.token_wise, watch.given, self.base),
        )

    def otherwise(self, error: NotSlicedError, slicing: Slicing) -> Slicing | None:
        """Return another slicing that may be one device's; None if there is none to try.

        With more modules shown whole sequences, in all blocks of a stack: those that attend, as of
        T5, which makes biases of the length that attention is given, and if they are shown
        already, those around them, which may make masks for them, up to their blocks. Else
        without the stack, if there are others.

        Args:
            error: Says which module is not one device's on slices.
            slicing: With which it is not.
        """
        where = error.where
        stack = next((each for each in slicing.stacks if f"{where}.".startswith(f"{each}.")), None)
        if stack is None:
            return None
        attending = (fqn for fqn in slicing.attending if f"{where}.".startswith(f"{fqn}."))
        where, shown = next(attending, where), slicing.shown.modules
        known = _within(stack, self.watch.token_wise)
        # Lists are called by nobody, and what is not around attention makes nothing for it.
        while where and not _may_show(where, known, slicing):
            where = where.rpartition(".")[0]
        if where and not error.is_whole:
            alike = {fqn for fqn, inner in known.items() if inner == known[where]}
            return self._slicing(slicing.stacks, shown | alike)
        others = slicing.stacks - {stack}
        if not others:
            return None
        _log.info("blocks of %s run on whole sequences: %s", stack, error)
        return self._slicing(others, shown)


def _may_show(fqn: str, known: Collection[str], slicing: Slicing) -> bool:
    """Whether a module that is called is not shown, and attends or is around one that does."""
    shown, inside = slicing.shown.modules, f"{fqn}."
    if fqn in shown or fqn not in known:
        return False
    return any(f"{each}.".startswith(inside) for each in slicing.attending | shown)


def _within(stack: str, fqns: Iterable[str]) -> dict[str, str]:
    """Return the modules in a stack, each with its name in its block."""
    inside = f"{stack}."
    found = (fqn for fqn in fqns if f"{fqn}.".startswith(inside))
    return {fqn: fqn.removeprefix(inside).partition(".")[2] for fqn in found}


def _draws(watch: ForwardWatch, stacks: frozenset[str]) -> dict[DrawKey, WholeDraw]:
    draws: dict[DrawKey, WholeDraw] = {}
    for stack in sorted(stacks & {*watch.draws}):
        for key, whole in watch.draws[stack].items():
            if whole is None:
                raise NotSlicedError(
                    f"{key[0]!r} draws random numbers of several shapes in one call of the model, "
                    "of which it cannot be told what ranks have"
                )
            draws[key] = whole
    return draws

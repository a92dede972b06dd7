"""What the last stage of a pipeline sees in the first call of a form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vescale_parallel._loss.output import is_loss
from vescale_parallel._loss.sum_ratios import SumRatios, ratios_to_count
from vescale_parallel._loss.token_mean import TokenCounts, TokenMeans
from vescale_parallel._torch_private import pytree

from .configurations import Setting, Settings
from .values import Cuts, ObservedValues

# Runs forward with placeholders, in a mode that sees its token means.
Run = Callable[[TokenCounts, ObservedValues], Any]


@dataclass(frozen=True)
class SeenCall:
    """What the last stage saw of a form of call, see [Note: what crosses a cut].

    Attributes:
        has_loss: Whether forward returns a scalar.
        cuts: What crosses them where only scalars of the output are looked at.
        all_cuts: Likewise, where all of the output is.
        counts_early: Whether a token mean comes before the last stage has called a block: then
            an earlier stage computes it, and needs to know the count, too.
        kept: The name of a scalar that forward keeps on a module, if it does and returns no loss.
        settings: What forward writes into configurations.
    """

    has_loss: bool
    cuts: Cuts
    all_cuts: Cuts
    counts_early: bool = False
    kept: str = ""
    settings: Settings = field(default_factory=dict[Setting, Any])


def seen_call(run: Run, last_start: int, are_counted: Sequence[bool] = ()) -> SeenCall:
    """Run forward to see what crosses cuts.

    ``last_start`` is the last stage's first block; for ``are_counted`` see :class:`.SumRatios`.
    """
    values = ObservedValues()
    counts = _PlacedCounts(values, ratios_to_count(are_counted))
    output = run(counts, values)
    early = counts.first_behind is not None and counts.first_behind <= last_start
    if early:
        # Again, since a mean that may be sent needs the name that all stages have for it.
        values = ObservedValues()
        output = run(_NamedMeans(ratios_to_count(are_counted)), values)
    has_loss = any(map(is_loss, pytree.tree_leaves(output)))
    cuts, all_cuts = (values.cuts(output, losses_only=only) for only in (True, False))
    return SeenCall(has_loss, cuts, all_cuts, early)


class _PlacedCounts(TokenCounts):
    """Notes how many blocks have been called before the first token mean."""

    def __init__(self, values: ObservedValues, ratios: SumRatios | None) -> None:
        super().__init__(ratios)
        self._values = values
        self.first_behind: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if self.counts and self.first_behind is None:
            self.first_behind = self._values.blocks_called
        return result


class _NamedMeans(TokenCounts):
    """Computes token means as passes do, function by function."""

    def __init__(self, ratios: SumRatios | None) -> None:
        super().__init__()
        self._means = TokenMeans(1, self._counted, ratios)

    def __enter__(self) -> _NamedMeans:
        self._means.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._means.__exit__(*raised)

    def _counted(self, index: int, counted: Tensor) -> Tensor:
        self.counts.append(counted)
        return counted

"""A model on which sharding plans are compared with one device, each thing once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._trace.dry_run import DryRunError
from vescale_parallel._verify.dry_runs import DryRuns
from vescale_parallel._verify.equivalence import (
    CheckResult,
    Compared,
    Contradiction,
    check_blocks,
    check_plan,
)


@dataclass(frozen=True)
class Subject:
    """The model on which plans are compared with one device.

    Attributes:
        runs: Its dry runs.
        size: Ranks that share it.
        needs_values: Whether forward does, so that shapes alone say nothing.
    """

    runs: DryRuns
    size: int
    needs_values: bool
    _results: dict[tuple[tuple[str, str], ...], CheckResult | str] = field(
        default_factory=dict["tuple[tuple[str, str], ...]", "CheckResult | str"]
    )
    _compared: Compared = field(default_factory=Compared)

    @property
    def model(self) -> nn.Module:
        """Which model it is."""
        return self.runs.model

    def result_of(self, plan: Mapping[str, str]) -> CheckResult:
        """Prove a plan, once; raise ValueError if it is wrong or was not compared in full."""
        key = tuple(plan.items())
        found = self._results.get(key)
        if isinstance(found, str):
            raise ValueError(found)
        if found is None:
            try:
                found = self._results[key] = self._check(plan)
            except ValueError as error:
                if not isinstance(error, DryRunError):
                    self._results[key] = str(error)  # the error would keep what was compared
                raise
        return found

    def misfit(self, plan: Mapping[str, str]) -> str:
        """Return why one rank's part does not run on shapes alone, empty if it may."""
        try:
            if not self.needs_values:
                self.runs.part(shard(plan, self.model, self.size))
        except DryRunError as error:
            return str(Contradiction(error.fqn, f"one rank's part does not run: {error}"))
        except ValueError as error:
            return str(error)
        return ""

    def is_right(self, plan: Mapping[str, str]) -> bool:
        """Whether :meth:`result_of` raises nothing."""
        try:
            self.result_of(plan)
        except ValueError:
            return False
        return True

    def prove_blocks(self, plan: Mapping[str, str]) -> None:
        """Prove a plan in blocks alone; raise ValueError if it is wrong there."""
        sharding = shard(plan, self.model, self.size)
        _refuse(check_blocks(self.runs, sharding, self._compared))

    def _check(self, plan: Mapping[str, str]) -> CheckResult:
        sharding = shard(plan, self.model, self.size)
        result = check_plan(
            self.runs, sharding, needs_values=self.needs_values, compared=self._compared
        )
        _refuse(result.too_large)
        for fqn, why in result.unchecked.items():
            raise ValueError(f"{fqn} was not compared with one device: {why}")
        return result


def _refuse(too_large: Sequence[str]) -> None:
    if too_large:
        raise ValueError(f"{too_large[0]} is too large to be run and compared with one device")

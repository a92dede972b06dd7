"""What came of comparing a plan with one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["N0", "N1", "N2", "N3", "N4", "N5"]
Status = Literal["passed", "failed", "does not apply"]

STATEMENTS: dict[Level, str] = {
    "N0": "initial values have one device's bits",
    "N1": "random numbers are one device's",
    "N2": "the same plan gives the same bits again",
    "N3": "bits of one device that runs the same micro-batches",
    "N4": "one device's numbers, within rounding",
    "N5": "bits of one rank that adds up in the same chunks",
}


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place where a plan's numbers are not one device's.

    Attributes:
        step: Of training, from 0; None for initial values.
        what: ``"activation"``, ``"loss"``, ``"gradient"``, ``"parameter"``, ``"buffer"``,
            ``"generator"``, or ``"initial value"``.
        name: Of the module or the parameter.
        rank: Whose value it is.
        index: Of the element that is furthest off, in the tensor as ``placements`` puts it
            together.
        found: The rank's value there.
        expected: One device's value there.
        error: How far off it is, in machine epsilons of the tensor's largest element.
        threshold: How far off rounding may put it, in the same unit; 0 where bits are compared.
        placements: How ranks hold the tensor, for an activation.
        fed_by: The last collective of the rank before, for an activation; empty if none was.
        partial: The last module before whose output ranks hold as terms of a sum, for an
            activation; such a sum may have been forgotten.
        note: What else there is to say.
    """

    step: int | None
    what: str
    name: str
    rank: int = 0
    index: tuple[int, ...] = ()
    found: float = 0.0
    expected: float = 0.0
    error: float = 0.0
    threshold: float = 0.0
    placements: str = ""
    fed_by: str = ""
    partial: str = ""
    note: str = ""

    def __str__(self) -> str:
        where = "before step 0" if self.step is None else f"step {self.step}"
        lines = [f"{where}: {self.what} of {self.name or 'the model'!r}, rank {self.rank}"]
        if self.note:
            lines.append(self.note)
        else:
            lines.append(
                f"element {list(self.index)}: {self.found!r}, one device {self.expected!r}; "
                f"off by {self.error:.3g} epsilons, rounding explains {self.threshold:.3g}"
            )
        if self.placements:
            lines.append(f"ranks hold it {self.placements}")
        if self.fed_by:
            lines.append(f"the collective before it: {self.fed_by}")
        if self.partial:
            lines.append(f"ranks hold terms of a sum since {self.partial!r}")
        return "\n    ".join(lines)


@dataclass(frozen=True, kw_only=True)
class LevelResult:
    """Whether one level of the numeric contract holds.

    Attributes:
        level: Of the contract; see ``docs/guide/verify.md``.
        status: What came out.
        text: Why it does not apply, or how much was compared.
        divergence: The first one, of a level that failed.
    """

    level: Level
    status: Status
    text: str = ""
    divergence: Divergence | None = None

    def __str__(self) -> str:
        text = f" ({self.text})" if self.text else ""
        line = f"{self.level}  {self.status:14}  {STATEMENTS[self.level]}{text}"
        return line if self.divergence is None else f"{line}\n    {self.divergence}"


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Whether a plan computes what one device computes. Printed, it is a table.

    Attributes:
        levels: Of the numeric contract, in order.
        num_compared: How many activations were compared.
        not_compared: Modules whose activations have shapes that ranks' do not make up.
    """

    levels: tuple[LevelResult, ...]
    num_compared: int = 0
    not_compared: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no level failed."""
        return all(result.status != "failed" for result in self.levels)

    @property
    def divergence(self) -> Divergence | None:
        """The first divergence of the level that says most: N0, then N4, else in order."""
        found = {r.level: r.divergence for r in self.levels if r.divergence is not None}
        order: tuple[Level, ...] = ("N0", "N4", "N1", "N2", "N3", "N5")
        return next((found[level] for level in order if level in found), None)

    def __str__(self) -> str:
        lines = [str(result) for result in self.levels]
        lines.append(f"compared {self.num_compared} outputs of modules, all losses and gradients")
        if self.not_compared:
            lines.append(f"not compared, for their shapes: {', '.join(self.not_compared)}")
        return "\n".join(lines)

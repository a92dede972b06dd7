"""What is predicted of a plan, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one pipeline rank at its fullest, by purpose; they add up to ``total``.

    Attributes:
        parameters: With what is gathered or cast for compute.
        gradients: Until the optimizer has them.
        optimizer: Its state.
        activations: Kept for backward, by all micro-batches in flight.
        output: What the model returns, and its gradient; on the rank that runs the last stage.
        fragmentation: What the allocator holds besides.
        reserved: What the driver and communicators take.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    output: float
    fragmentation: float
    reserved: float

    @property
    def total(self) -> float:
        """What the device must have."""
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of one step of the slowest pipeline rank; they add up to the step's.

    Attributes:
        matrix_products: Of forward, backward and recomputation.
        attention: Likewise, of the scores alone.
        memory_bound: Element-wise operators, and starting those that are too small.
        tensor_parallel: Communication of that axis that nothing hides, as of the next ones.
        context_parallel: Likewise.
        expert_parallel: Likewise: tokens to experts, and back.
        pipeline_parallel: Likewise: hand-over between stages.
        data_parallel: Likewise.
        bubble: Waiting for other stages.
        optimizer: Its step.
    """

    matrix_products: float
    attention: float
    memory_bound: float
    tensor_parallel: float
    context_parallel: float
    pipeline_parallel: float
    data_parallel: float
    bubble: float
    optimizer: float
    expert_parallel: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What :func:`vescale_planner.predict` says of one optimizer step.

    Attributes:
        step_seconds: How long it takes.
        tokens_per_second_per_device: Rows where there is no sequence.
        mfu: Share of the devices' peak that the model's own flops use.
        memory: Of every pipeline rank.
        breakdown: What the step is spent on.
        assumptions: What was assumed, in sentences.
    """

    step_seconds: float
    tokens_per_second_per_device: float
    mfu: float
    memory: tuple[RankMemory, ...]
    breakdown: Breakdown
    assumptions: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank."""
        return round(max(each.total for each in self.memory))

    def to_json(self) -> str:
        """Return the prediction as indented JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Prediction:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: If it is something else.
        """
        try:
            record: Any = json.loads(text)
            known = {each.name for each in fields(cls)}
            if not isinstance(record, dict) or not set(record) <= known:
                raise TypeError(f"fields are {sorted(known)}")
            record["memory"] = tuple(RankMemory(**each) for each in record["memory"])
            record["breakdown"] = Breakdown(**record["breakdown"])
            record["assumptions"] = tuple(record["assumptions"])
            return cls(**record)
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(
                f"expected a Prediction as JSON, got {text[:80]!r}: {error}"
            ) from None

"""A plan for people: sentences about its sizes, and lines short enough for a terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any, cast

from .config import ContextParallel, DataParallel, ExpertParallel, TensorParallel
from .pipeline_config import PipelineParallel
from .recomputation import Recompute, keeps_some, recomputes

WIDTH = 100
_ZERO = {
    0: "parameters, gradients and optimizer state are replicated in each (as DDP does)",
    1: "optimizer state is sharded over {ranks} ranks (ZeRO 1)",
    2: "gradients and optimizer state are sharded over {ranks} ranks (ZeRO 2)",
    3: "parameters, gradients and optimizer state are sharded over {ranks} ranks (ZeRO 3, as "
    "FSDP does)",
}
_OFFLOAD = {
    "optimizer": "what the optimizer updates is in the host's memory, where it steps",
    "parameters": "parameters are in the host's memory, but for those that are gathered, and the "
    "optimizer steps there",
}


def in_words(
    tensor: TensorParallel,
    pipeline: PipelineParallel,
    data: DataParallel,
    experts: ExpertParallel,
    context: ContextParallel,
    recompute: Recompute,
) -> list[str]:
    """Return one sentence for every kind of parallelism that a plan uses."""
    said: list[str] = []
    if data.size > 1:
        said.append(f"the batch is split over {data.size} data-parallel replicas")
        copies = max(data.replicate_size, experts.size)
        said.append(_ZERO[data.zero_stage].format(ranks=data.size // copies * context.size))
        if data.zero_stage and copies > 1:
            said.append(f"there are {copies} copies of that (hybrid sharding)")
        if data.replicate_zero_stage:
            said[-1] = (
                f"there are {copies} copies of the parameters, which share out the optimizer "
                "state (HFSDP)"
            )
    if data.offload != "none":
        said.append(_OFFLOAD[data.offload])
    if experts.size > 1:
        said.append(f"of experts each of {experts.size} data-parallel ranks has its own ones")
    if context.size > 1:
        how = ", which attend in a ring" if context.method == "ring" else ""
        said.append(f"each sequence is sliced over {context.size} context-parallel ranks{how}")
        if data.size == 1 and data.zero_stage:
            said.append(_ZERO[data.zero_stage].format(ranks=context.size))
    if tensor.size > 1:
        said.append(f"each layer is sharded over {tensor.size} tensor-parallel ranks")
    if pipeline.size > 1:
        said.append(
            f"the layers are split into {pipeline.num_stages} pipeline stages on {pipeline.size} "
            f"ranks, each batch into {pipeline.microbatches} micro-batches ({pipeline.schedule})"
        )
    if not said:
        said.append("a single device: nothing is sharded, split or sent")
    if recompute == "full":
        said.append("activations are computed again in backward (activation checkpointing)")
    elif recomputes(recompute) and not keeps_some(recompute):
        said.append(
            "activations of some blocks are computed again in backward (activation checkpointing)"
        )
    elif recomputes(recompute):
        said.append("some activations are computed again in backward (selective checkpointing)")
    return said


def entry(key: str, value: Any) -> list[str]:
    """Return a field as lines of JSON, to be read, compared and pasted."""
    text = f"{key}: {json.dumps(value, default=dict)}"
    is_long = len(text) > WIDTH - 2
    if isinstance(value, Mapping) and (is_long or len(cast("Mapping[str, Any]", value)) > 1):
        # One line an entry.
        text = f"{key}: {json.dumps(value, default=dict, indent=2)}"
    elif isinstance(value, list | tuple) and is_long:
        items = cast("list[Any]", value)
        return [f"  {key}: [", *filled(json.dumps(list(items))[1:-1], "    "), "  ]"]
    return [f"  {line}" for line in text.splitlines()]


def filled(text: str, start: str, then: str | None = None) -> list[str]:
    """Return a paragraph as lines of at most :data:`WIDTH` characters; words are not broken.

    The first line begins with ``start``, the others with ``then``, if that is given.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=start if then is None else then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def rates(
    step_seconds: float, samples: int | None, tokens: int | None, mfu: float | None
) -> list[str]:
    """Return what is done in a second, as far as it is known."""
    said: list[str] = []
    if samples:
        said.append(f"{three_digits(samples / step_seconds)} samples/s")
    if tokens:
        said.append(f"{three_digits(tokens / step_seconds)} tokens/s")
    if mfu:
        said.append(f"MFU {mfu:.1%}" if mfu >= 0.001 else "MFU below 0.1%")
    return said


def three_digits(number: float) -> str:
    """Return a number with three digits, and no exponent."""
    if number >= 100:
        return f"{float(f'{number:.3g}'):,.0f}"
    return f"{number:.3g}"

"""``vescale plan``: how a model would run on machines that nobody has to rent for it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vescale_parallel import ParallelPlan
from vescale_planner import Cluster, explain_plan, generate_plans

from .command import Command, CommandError
from .model_source import deferred_model, function_of, is_function, token_batch

_EPILOG = """examples:
  vescale plan meta-llama/Llama-3.1-8B --world-size 64 --cluster h100
  vescale plan ./config.json --world-size 8 --cluster h100 -c tensor_parallel.size=2 --top 3
  vescale plan train.py:make_model --world-size 4 --cluster cpu --output plan.json --html plan.html
"""
# As Python and JSON write them.
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a HuggingFace model name, config.json or its directory; or module:factory or "
        "file.py:factory, called without arguments",
    )
    parser.add_argument("--world-size", type=int, help="ranks, by default one machine's")
    parser.add_argument(
        "--cluster", type=str.lower, choices=Cluster.names(), help="by default this machine"
    )
    parser.add_argument(
        "-c",
        "--constraint",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="obeyed exactly, may be repeated: -c batch.global_size=512 -c recompute=full",
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        metavar="TOKENS",
        help="observe a HuggingFace language model on so many tokens, instead of estimating",
    )
    parser.add_argument(
        "--example-batch",
        metavar="SOURCE",
        help="module:function that returns what one data-parallel rank gives the model in a step",
    )
    parser.add_argument("--optimizer", default="adamw", help="for its memory (default: adamw)")
    parser.add_argument("--top", type=int, default=1, metavar="N", help="show N plans")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the best plan as JSON")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page on the best plan: time, memory, alternatives, what would change it",
    )


def _run(options: argparse.Namespace) -> int:
    constraints = parse_constraints(options.constraint)
    model = deferred_model(options.model)
    given: dict[str, Any] = {
        "world_size": _world_size(options.world_size, options.cluster),
        "cluster": options.cluster,
        "example_batch": _example_batch(options),
        "optimizer": options.optimizer,
    }
    plans = generate_plans(model, constraints, top=options.top, **given)
    best = plans[0]
    if options.html is not None:
        page = explain_plan(model, constraints, **given).to_html()
        options.html.write_text(page, encoding="utf-8")
    if options.output is not None:
        options.output.write_text(best.to_json() + "\n", encoding="utf-8")
    if options.json:
        records = [json.loads(plan.to_json()) for plan in plans]
        print(json.dumps(records[0] if options.top == 1 else records, indent=2))
        return 0
    print(best)
    if len(plans) > 1:
        print("\n".join(["", *table(plans)]))
    if best.estimate is not None and best.estimate.is_assumed:
        option = "--example-batch" if is_function(options.model) else "--sequence-length"
        print(f"\n{option} has the model observed, instead of assuming what a batch costs")
    if options.output is not None:
        print(f"\nwritten to {options.output}; read it by ParallelPlan.from_json")
    if options.html is not None:
        print(f"\nexplained in {options.html}")
    return 0


def parse_constraints(entries: Sequence[str]) -> dict[str, Any]:
    """Return constraints from ``key=value`` texts; values are JSON, Python's constants or text.

    Raises:
        CommandError: If an entry has no ``=``, or a key is given twice.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals or not key:
            raise CommandError(f"expected -c KEY=VALUE, got {entry!r}")
        if key in found:
            raise CommandError(f"expected {key} once, got {found[key]!r} and {text!r}")
        found[key] = _value(text)
    return found


def _value(text: str) -> Any:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _world_size(given: int | None, cluster: str | None) -> int | None:
    if given is None and cluster is not None:
        return Cluster.preset(cluster).ranks_per_node if cluster != "cpu" else 1
    return given


def _example_batch(options: argparse.Namespace) -> Any:
    if options.example_batch is not None:
        return function_of(options.example_batch)()
    if options.sequence_length is None:
        return None
    if is_function(options.model):
        raise CommandError(
            "--sequence-length makes batches of HuggingFace language models; for a model of your "
            "own give --example-batch module:function"
        )
    return token_batch(1, options.sequence_length)


def table(plans: Sequence[ParallelPlan]) -> list[str]:
    """Return one line for each plan, for comparison."""
    rows = [("", "ranks", "s a step", "GiB a rank", "samples/s", "tokens/s", "MFU")]
    rows += [_row(number, plan) for number, plan in enumerate(plans, 1)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(number: int, plan: ParallelPlan) -> tuple[str, ...]:
    estimate = plan.estimate
    assert estimate is not None
    seconds = estimate.step_seconds
    mfu = estimate.mfu(plan.world_size)
    return (
        f"{number}.",
        _layout(plan),
        f"{seconds:.3g}",
        f"{estimate.memory_bytes / 2**30:.1f}",
        _per_second(estimate.samples, seconds),
        _per_second(estimate.tokens, seconds),
        "-" if mfu is None else f"{mfu:.1%}",
    )


def _per_second(count: int | None, seconds: float) -> str:
    if not count:
        return "-"
    rate = count / seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _layout(plan: ParallelPlan) -> str:
    data, pipeline = plan.data_parallel, plan.pipeline_parallel
    sizes = {"data": data.size, "tensor": plan.tensor_parallel.size, "pipeline": pipeline.size}
    words = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    extra = f", ZeRO {data.zero_stage}" if data.zero_stage else ""
    extra += f", {pipeline.microbatches} micro-batches" if pipeline.size > 1 else ""
    extra += ", recompute" if plan.recompute != "none" else ""
    return (words or "a single device") + extra


COMMAND = Command(
    name="plan",
    help="find how a model would run on so many devices; needs none of them",
    add_arguments=_add_arguments,
    run=_run,
)

"""``vescale verify``: compare a plan with one device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

import torch

import vescale
from vescale import ParallelPlan

from .command import Command, CommandError
from .model_source import function_of, is_function, model_factory, random_token_batch


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train on one device and under a plan, with all ranks in this process, and say whether "
        "initial values, outputs of modules, losses, gradients and parameters are the same; "
        "under torchrun the real ranks are compared, too"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module:factory or file.py:factory, called without arguments; or a HuggingFace "
        "config.json or its directory",
    )
    parser.add_argument(
        "--plan", required=True, metavar="FILE", help="as vescale plan --output writes it"
    )
    parser.add_argument(
        "--batch",
        metavar="SOURCE",
        help="module:function that returns a global batch, or a list of one for every step; "
        "default: tokens, for a HuggingFace language model",
    )
    parser.add_argument("--steps", type=int, default=3, help="of training (default: 3)")
    parser.add_argument(
        "--dtype",
        default="float64",
        choices=("float64", "float32", "bfloat16", "as-is"),
        help="of model and batch (default: float64, in which rounding hides nothing)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace) -> int:
    path = Path(options.plan)
    if not path.is_file():
        raise CommandError(f"expected a plan as vescale plan --output writes it, got {path}")
    plan, model_fn = ParallelPlan.from_json(path.read_text()), model_factory(options.model)
    if options.batch is not None:
        batch = function_of(options.batch)()
    elif is_function(options.model):
        raise CommandError("a model of your own needs --batch module:function, a global batch")
    else:
        rows = 2 * plan.data_parallel.size * plan.pipeline_parallel.microbatches
        batch = random_token_batch(
            rows * plan.batch.gradient_accumulation, 16, model_fn().config.vocab_size
        )
    report = vescale.verify(
        plan, model_fn, batch, steps=options.steps, dtype=getattr(torch, options.dtype, None)
    )
    text = str(report)
    if options.json:
        text = json.dumps({**dataclasses.asdict(report), "passed": report.passed}, indent=2)
    if os.environ.get("RANK", "0") == "0":  # every rank has the same report
        print(text)
    return 0 if report.passed else 1


COMMAND = Command(
    name="verify",
    help="compare a plan with one device: values, losses, gradients, parameters",
    add_arguments=_add_arguments,
    run=_run,
)

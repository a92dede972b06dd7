"""The command line of ``train_llama.py``: from strings to options that fit together."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from stdlib_text import VOCABULARY
from transformers import AutoConfig

from vescale import ParallelPlan
from vescale_parallel import Batch, check_constraints, with_constraints

# Ten million parameters.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 320,
    "intermediate_size": 960,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
}
MAX_LENGTH = 128  # tokens in a sample
CPU_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train and how.

    Attributes:
        config: Of a HuggingFace causal language model.
        length: Tokens in a sample.
        steps: Of both phases together.
        world_size: Ranks of the first phase.
        constraints: Of the first phase's plan.
        plan: The first phase's plan, None to generate it.
        batch: The batches of all runs.
        seed: Of the weights.
        output: Directory for everything that is written.
    """

    config: dict[str, Any]
    length: int
    steps: int
    world_size: int
    constraints: dict[str, Any]
    plan: ParallelPlan | None
    batch: Batch
    seed: int
    output: Path


def parse(argv: Sequence[str]) -> Options:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description="Train a Llama nD-parallel on real text, change plan half way, and compare "
        "with one device.",
    )
    parser.add_argument(
        "--model", type=_config, default=LLAMA, metavar="PATH_OR_CONFIG",
        help="HuggingFace config.json, or the directory it is in; weights are random, and "
        "dropout has to be 0 to compare with one device (default: a Llama of 10M parameters)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=40, help="of both phases together (default: %(default)s)"
    )
    parser.add_argument(
        "--constraints", type=_constraint, nargs="*", metavar="KEY=VALUE",
        help="of the first phase's plan, like tensor_parallel.size=4; none leaves all to the "
        "planner (default: tensor and pipeline parallel)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", type=_plan, metavar="FILE", help="JSON of the first phase's plan"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of weights and order of samples (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs", "train_llama"),
        metavar="DIR",
        help="where everything is written (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    try:
        return _options(arguments)
    except ValueError as error:
        parser.error(str(error))


def _options(arguments: argparse.Namespace) -> Options:
    """Fill in what nobody gave.

    Raises:
        ValueError: If options are out of range or contradict each other.
    """
    if arguments.steps < 2:
        raise ValueError(f"expected --steps of at least 2, one a phase, got {arguments.steps}")
    plan: ParallelPlan | None = arguments.plan
    if plan is not None and arguments.constraints is not None:
        raise ValueError("expected --plan or --constraints, got both: a plan leaves nothing open")
    world_size = _world_size(plan)
    if arguments.constraints is None:
        constraints = {} if plan else _default_constraints(world_size)
    else:
        constraints = dict(arguments.constraints)
        check_constraints(constraints)
    return Options(
        config=arguments.model,
        length=_length(arguments.model),
        steps=arguments.steps,
        world_size=world_size,
        constraints=constraints,
        plan=plan,
        batch=_batch(plan, constraints, world_size, arguments.seed),
        seed=arguments.seed,
        output=arguments.output,
    )


def _world_size(plan: ParallelPlan | None) -> int:
    gpus = torch.cuda.device_count()
    if plan is None:
        return gpus or CPU_RANKS
    if gpus and plan.world_size > gpus:
        raise ValueError(f"the plan is for {plan.world_size} ranks, this machine has {gpus} GPUs")
    return plan.world_size


def _default_constraints(world_size: int) -> dict[str, Any]:
    """Show several axes at once where there are enough ranks."""
    if world_size % 4:
        return {}
    return {
        "tensor_parallel.size": 2,
        "pipeline_parallel.size": 2,
        "pipeline_parallel.microbatches": 4,
    }


def _batch(
    plan: ParallelPlan | None, constraints: Mapping[str, Any], world_size: int, seed: int
) -> Batch:
    """Return the one batch section that both phases and the check use."""
    if plan is not None and plan.batch.global_size is not None:
        return plan.batch
    # Both phases have to divide it.
    rows = math.lcm(16, 2 * world_size)
    default = ParallelPlan(batch=Batch(global_size=rows, shuffle=True, seed=seed))
    given = {key: value for key, value in constraints.items() if key.startswith("batch.")}
    return with_constraints(default, given).batch


def _length(config: Mapping[str, Any]) -> int:
    """Return what the model has positions for, up to a limit."""
    return min(MAX_LENGTH, AutoConfig.for_model(**config).max_position_embeddings)


def _config(path: str) -> dict[str, Any]:
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    record = _json_object(file)
    try:
        config = AutoConfig.for_model(**record)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{file} is no HuggingFace config: {error}") from error
    if config.vocab_size < VOCABULARY:
        raise argparse.ArgumentTypeError(
            f"expected a vocab_size of at least {VOCABULARY} (bytes, begin and end of a file), "
            f"got {config.vocab_size} in {file}"
        )
    return record


def _plan(path: str) -> ParallelPlan:
    try:
        return ParallelPlan.from_json(json.dumps(_json_object(Path(path))))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error


def _json_object(file: Path) -> dict[str, Any]:
    try:
        record: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{file} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object in {file}")
    return cast("dict[str, Any]", record)


def _constraint(text: str) -> tuple[str, Any]:
    """Split ``key=value``; a value that is no JSON is a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value

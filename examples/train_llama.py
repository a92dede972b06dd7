"""Train a Llama nD-parallel on real text, change plan half way, and compare with one device.

Run ``nox -s train``, or ``python examples/train_llama.py`` where vescale, transformers, rich
and matplotlib are installed. It starts its ranks itself: one for each GPU, else four on the
CPU. :func:`train` is what you would write for a model of your own; the rest is the show.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from options import Options, parse
from ranks import Phase, run_phase, run_rank
from report import Curve, Reporter, compare, plot, print_summary, write_result
from speed import remarks
from stdlib_text import Text, gather_text
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM

import vescale
from vescale import ParallelPlan
from vescale_parallel import Batch, with_constraints

LEARNING_RATE, WARMUP_STEPS = 1e-3, 5
NUM_VALIDATIONS = 10
# What still counts as rounding, relative to one device's loss. float32 rounds at 6e-8; other
# orders of addition then drift apart, step by step, in an optimizer that divides by noise: by
# 4e-6 in the 40 steps of the default run.
BOUND = 1e-4


class LanguageModel(nn.Module):
    """An unmodified HuggingFace model, called with a batch and returning its loss."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.float32
        )

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model(**batch, use_cache=False).loss


def train(phase: Phase) -> Curve:
    """Train on this rank: the five calls of vescale around the loop of one device."""
    text = gather_text(phase.length)
    torch.manual_seed(phase.seed)
    model = vescale.deferred_init(LanguageModel, phase.config)
    plan = given_plan(phase) or vescale.generate_plan(
        model, phase.constraints, example_batch=text.example_batch()
    )
    print(plan)
    model, optimizer, scheduler, loader = vescale.parallelize(
        plan, model, make_optimizer, lambda o: make_scheduler(o, phase.steps), text.train
    )
    state = {
        "plan": plan, "model": model, "optimizer": optimizer, "lr_scheduler": scheduler,
        "loader": loader,
    }  # fmt: skip
    if phase.first_step > 0:
        vescale.load(phase.checkpoint, state)
    with reporter_of(phase, plan, model, text) as reporter:
        for batch in loader:
            loss = model(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if reporter.step(loss) == phase.last_step:
                break
    vescale.save(phase.checkpoint, state)
    return reporter.curve


def train_on_one_device(options: Options, text: Text) -> Curve:
    """Train all steps from scratch with torch alone: the same weights, the same batches."""
    torch.set_num_threads(1)  # as a rank has: the same order of additions
    torch.manual_seed(options.seed)
    model = LanguageModel(options.config).to(this_device())
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, options.steps)
    sampler = sampler_of(options.batch, text)
    loader = DataLoader(text.train, batch_size=options.batch.global_size, sampler=sampler)
    with reporter_of_one_device(options, model, text) as reporter:
        for batch in loader:
            loss = model(on_device(batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if reporter.step(loss) == options.steps:
                break
    return reporter.curve


def make_optimizer(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)


def make_scheduler(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Warm up, then follow a cosine down to a tenth."""

    def factor(step: int) -> float:
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        return warmup * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    return LambdaLR(optimizer, factor)


def sampler_of(batch: Batch, text: Text) -> RandomSampler | SequentialSampler:
    """Return the order in which a plan with this batch section reads the text."""
    if not batch.shuffle:
        return SequentialSampler(text.train)
    return RandomSampler(text.train, generator=torch.Generator().manual_seed(batch.seed))


def given_plan(phase: Phase) -> ParallelPlan | None:
    return None if phase.plan is None else ParallelPlan.from_json(phase.plan)


def this_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def on_device(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(this_device()) for name, tensor in batch.items()}


def reporter_of(phase: Phase, plan: ParallelPlan, model: nn.Module, text: Text) -> Reporter:
    if dist.get_rank() == 0:
        Path(phase.directory, "plan.json").write_text(plan.to_json(), encoding="utf-8")
    return Reporter(
        phase.title,
        plan=in_words(plan),
        world_size=phase.world_size,
        first_step=phase.first_step,
        last_step=phase.last_step,
        tokens_per_step=(plan.batch.global_size or 0) * phase.length,
        validation_steps=validation_steps(phase.steps),
        validate=lambda: validation_loss(model, text, plan.batch),
    )


def reporter_of_one_device(options: Options, model: nn.Module, text: Text) -> Reporter:
    return Reporter(
        "one device",
        plan="torch alone",
        world_size=1,
        first_step=0,
        last_step=options.steps,
        tokens_per_step=(options.batch.global_size or 0) * options.length,
        validation_steps=validation_steps(options.steps),
        validate=lambda: validation_loss(model, text, options.batch),
    )


def in_words(plan: ParallelPlan) -> str:
    """Return the mesh of a plan, for example ``"pp 2 x tp 2"``."""
    axes = {"pp": plan.pipeline_parallel, "dp": plan.data_parallel, "tp": plan.tensor_parallel}
    words = " x ".join(f"{name} {axis.size}" for name, axis in axes.items() if axis.size > 1)
    stage = plan.data_parallel.zero_stage
    return (words or "one rank") + (f", ZeRO {stage}" if stage else "")


def validation_steps(steps: int) -> list[int]:
    """Return the steps after which to validate; the last of each phase is one of them."""
    every = max(1, steps // NUM_VALIDATIONS)
    return sorted({*range(every, steps, every), steps // 2, steps})


@torch.no_grad()
def validation_loss(model: nn.Module, text: Text, batch: Batch) -> float:
    """Return the loss on held-out text. Every rank must call this.

    Every rank gives the model the same rows, so the mean over data-parallel ranks is the
    loss of each.
    """
    model.eval()
    # As many rows as a training step has: they divide into micro-batches.
    loss = model(on_device(text.validation_batch(batch.global_size or 1)))
    model.train()
    return loss.item()


def phases_of(options: Options) -> tuple[Phase, Phase]:
    """Return the halves of one training, under different plans and world sizes."""
    batch = {f"batch.{name}": value for name, value in asdict(options.batch).items()}
    half = options.steps // 2
    shared: dict[str, Any] = {
        "config": options.config,
        "length": options.length,
        "seed": options.seed,
        "steps": options.steps,
        "checkpoint": str(options.output / "checkpoint"),
    }
    first = Phase(
        title="phase 1",
        directory=str(options.output / "phase-1"),
        world_size=options.world_size,
        constraints={**options.constraints, **batch},
        plan=with_constraints(options.plan, batch).to_json() if options.plan else None,
        first_step=0,
        last_step=half,
        **shared,
    )
    fewer = max(1, options.world_size // 2)
    second = Phase(
        title="phase 2",
        directory=str(options.output / "phase-2"),
        world_size=fewer,
        constraints={"data_parallel.size": fewer, "data_parallel.zero_stage": 3, **batch},
        plan=None,
        first_step=half,
        last_step=options.steps,
        **shared,
    )
    return first, second


def launch(options: Options) -> bool:
    """Run both phases and the check; return whether their losses agree."""
    started = time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    text = gather_text(options.length)
    check_amount_of_text(text, options)
    curves: list[Curve] = []
    for phase in phases_of(options):
        steps = f"steps {phase.first_step + 1} to {phase.last_step}"
        resumed = ", from the checkpoint" if phase.first_step else ""
        ranks = f"{phase.world_size} rank{'s' if phase.world_size > 1 else ''}"
        print_heading(f"{phase.title}: {steps} on {ranks}{resumed}")
        curves.append(run_phase(phase, __file__))
    print_heading("check: the same steps on one device, with torch alone")
    alone = train_on_one_device(options, text)
    comparison = compare(curves, alone, bound=BOUND)
    print_summary([*curves, alone])
    cores, gpus = os.cpu_count() or 1, torch.cuda.device_count()
    print("\n".join(remarks(curves, options.output, cores=cores, gpus=gpus)))
    plot(options.output / "losses.png", curves, alone, comparison)
    write_result(
        options.output / "result.json", curves, alone, comparison,
        config=options.config, seed=options.seed, torch=torch.__version__,
        machine=f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.cuda.device_count()} GPUs",
        seconds=time.perf_counter() - started,
    )  # fmt: skip
    verdict = "within" if comparison.is_within_bound else "ABOVE"
    print(
        f"largest relative difference from one device: {comparison.largest:.2e} at step "
        f"{comparison.at_step}, {verdict} the bound of {BOUND:.0e}\n"
        f"wrote {options.output}/losses.png and result.json in "
        f"{time.perf_counter() - started:.0f} s"
    )
    return comparison.is_within_bound


def print_heading(heading: str) -> None:
    print(f"\n== {heading}", flush=True)


def check_amount_of_text(text: Text, options: Options) -> None:
    rows = options.batch.global_size or 0
    if rows * options.steps > len(text.train):
        sys.exit(
            f"expected at most {len(text.train) // rows} steps of {rows} samples of the text, "
            f"got --steps {options.steps}"
        )


def main() -> None:
    match sys.argv[1:]:
        case ["--ranks-of", directory]:
            run_rank(Path(directory), train)
        case arguments:
            if not launch(parse(arguments)):
                sys.exit(1)


if __name__ == "__main__":
    main()

"""Training runs under any plan, next to one device's: equal, refused, warned of, or wrong."""

from __future__ import annotations

import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import vescale
from vescale_testing import RankError, World

from .families import InDouble
from .plans import DP, TP, Constraints, make_plan
from .training import whole

Batch = dict[str, Tensor]
Verdict = Literal["equal", "refused", "warned", "WRONG", "CRASH", "HANG"]
BAD: tuple[Verdict, ...] = ("WRONG", "CRASH", "HANG")
_REFUSALS = (ValueError, TypeError, NotImplementedError)
_PLAN_KEYS = ("data_parallel", "tensor_parallel", "pipeline_parallel", "recompute", "micro-batch")
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What to train, apart from the plan. Ranks unpickle it: functions are module-level.

    Attributes:
        build: Makes the model. Default dtype and generator are set.
        batches: Makes the global batches, one a step.
        optimizer: ``"sgd"`` (with momentum) or ``"adamw"``.
        row_dim: Dim of every tensor of a batch that rows are along. Other than 0, batches go
            to the model without a loader, and ``parallelize`` knows no example.
        loader: Whether ``parallelize`` is given the rows as a data set.
        casts: Whether to turn the model's own casts to float32 off.
        evaluates: Whether to evaluate at the end, on the first batch.
        accumulate: Batches whose gradients are summed for one step of the optimizer.
        clip: To what norm gradients are clipped, None for not at all.
        parts: Equal parts of a batch that one device runs one after the other.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[], Sequence[Batch]]
    optimizer: Literal["sgd", "adamw"] = "sgd"
    row_dim: int = 0
    loader: bool = True
    casts: bool = False
    evaluates: bool = True
    accumulate: int = 1
    clip: float | None = None
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception of one rank.

    Attributes:
        kind: Name of its class.
        message: Its text.
        phase: ``"parallelize"``, or which step of training.
        is_refusal: Whether vescale raised it, as an error that users can cause.
        is_of_peer: Whether it only says that another rank failed.
        trace: The formatted traceback.
    """

    kind: str
    message: str
    phase: str
    is_refusal: bool
    is_of_peer: bool
    trace: str


@dataclass(kw_only=True)
class Record:
    """What came of a trial on one device or one rank; full tensors by step and name."""

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    grads: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    parameters: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    evaluation: float | None = None
    state: Tensor = field(default_factory=torch.get_rng_state)
    warnings: list[str] = field(default_factory=list[str])
    names: list[str] = field(default_factory=list[str])
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What came of it, what of that to keep the same when a case is made smaller, and the rest."""

    verdict: Verdict
    kind: str = ""
    detail: str = ""


def _optimizer(name: str) -> Callable[[nn.Module], Optimizer]:
    if name == "sgd":
        return lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9)
    # A large epsilon: gradients that are nothing but rounding must not decide an update.
    return lambda model: AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def run(trial: Trial, constraints: Constraints | None) -> Record:
    """Train on one device, or under a plan as one of its ranks."""
    record = Record()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    phase = ["construction"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _run(trial, constraints, record, phase)
        except Exception as error:
            if constraints is None:
                raise
            record.failure = _failure(error, phase[0])
        finally:
            torch.set_default_dtype(torch.float32)
    record.warnings = [str(w.message) for w in caught if w.category is UserWarning]
    return record


def _run(trial: Trial, constraints: Constraints | None, record: Record, phase: list[str]) -> None:
    model: Any = trial.build()
    record.names = [name for name, _ in model.named_modules()][1:]
    record.names += [name for name, _ in model.named_parameters()]
    record.names += sorted({type(module).__name__ for module in model.modules()})
    batches, optimizer_fn = trial.batches(), _optimizer(trial.optimizer)
    given: Any = batches
    phase[0] = "parallelize"
    if constraints is None:
        optimizer = optimizer_fn(model)
    elif trial.loader and trial.row_dim == 0:
        model, optimizer, given = _with_loader(trial, model, batches, constraints)
    else:
        model, optimizer = vescale.parallelize(make_plan(constraints), model, optimizer_fn)
        given = [_part(batch, constraints, trial.row_dim) for batch in batches]
    given = list(given)  # a loader draws from the generator, too
    torch.manual_seed(7)
    numpy.random.seed(7)
    for step, batch in enumerate(given):
        phase[0] = f"step {step}"
        model.step = step  # for control flow that depends on it
        losses: list[float] = []
        parts = [batch] if constraints is not None else _parts(batch, trial)
        for part in parts:
            loss = _loss(trial, model, part) / trial.accumulate
            losses.append(loss.item())
            (loss / len(parts)).backward()
        record.losses.append(sum(losses) / len(losses))
        record.grads.append(
            {
                name: whole(p.grad).clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )
        if (step + 1) % trial.accumulate == 0:
            if trial.clip is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), trial.clip)
                record.norms.append(whole(norm).item())
            optimizer.step()
            optimizer.zero_grad()
    record.parameters = {name: whole(p).clone() for name, p in model.named_parameters()}
    record.buffers = {name: whole(b).clone() for name, b in model.named_buffers()}
    record.state = torch.get_rng_state()
    if trial.evaluates:
        phase[0] = "evaluation"
        model.eval()
        with torch.no_grad():
            record.evaluation = _loss(trial, model, given[0]).item()


def _parts(batch: Batch, trial: Trial) -> list[Batch]:
    """Return what one device runs one after the other."""
    cut = {name: tensor.chunk(trial.parts, trial.row_dim) for name, tensor in batch.items()}
    return [{name: parts[i] for name, parts in cut.items()} for i in range(trial.parts)]


def _loss(trial: Trial, model: Any, batch: Batch) -> Tensor:
    if trial.casts:
        with InDouble():
            output = model(batch)
    else:
        output = model(batch)
    return torch.stack([*output.values()]).sum() if isinstance(output, dict) else output


def _with_loader(
    trial: Trial, model: Any, batches: Sequence[Batch], constraints: Constraints
) -> Any:
    rows = len(next(iter(batches[0].values())))
    dataset = [{k: v[row] for k, v in batch.items()} for batch in batches for row in range(rows)]
    plan = make_plan({"batch.global_size": rows, **constraints})
    return vescale.parallelize(plan, model, _optimizer(trial.optimizer), None, dataset)


def _part(batch: Batch, constraints: Constraints, dim: int) -> Batch:
    """Return this rank's rows of a global batch."""
    ranks = constraints.get(DP, 1)
    own = dist.get_rank() // constraints.get(TP, 1) % ranks
    return {name: tensor.chunk(ranks, dim)[own] for name, tensor in batch.items()}


def _failure(error: Exception, phase: str) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    of_vescale = str(_ROOT / "packages") in frames[-1].filename
    return Failure(
        kind=type(error).__name__,
        message=str(error),
        phase=phase,
        is_refusal=of_vescale and isinstance(error, _REFUSALS),
        is_of_peer=isinstance(error, vescale.PeerError),
        trace="".join(traceback.format_exception(error)),
    )


def judge(
    worlds: Mapping[int, World],
    trial: Trial,
    ranks: int,
    plan: Constraints,
    *,
    under: Trial | None = None,
) -> Judgement:
    """Compare a plan with one device, on every rank; ``under`` is what the ranks do instead."""
    return compare(one_device(trial), attempts(worlds[ranks], under or trial, plan))


def one_device(trial: Trial) -> Record:
    """Do a trial in this process, with one thread and without leaving a trace."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        return run(trial, None)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def attempts(world: World, trial: Trial, plan: Constraints) -> list[Record] | RankError:
    """Do a trial on all ranks, in a process group of its own."""
    # Ranks stay in the group that they make, so what they meet in stays, too.
    directory = mkdtemp(dir=_MEETING_PLACES.name)
    try:
        records = world.run(on_rank, directory, trial, plan)
    except RankError as error:
        return error
    failures = {r.failure.message if r.failure else "" for r in records}
    if len(failures) > 1 or any(r.failure and not r.failure.is_refusal for r in records):
        world.close()  # ranks may have come apart
    return records


_MEETING_PLACES = TemporaryDirectory()


def on_rank(directory: str, trial: Trial, constraints: Constraints) -> Record:
    """Do a trial as one rank, whose collectives give up after seconds and not after a minute."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=15),
    )
    return run(trial, constraints)


def compare(
    expected: Record,
    found: list[Record] | RankError,
    *,
    relative: float = 1e-12,
) -> Judgement:
    """Say what came of a trial, from one device's record and the ranks'."""
    if isinstance(found, RankError):
        verdict = "HANG" if "no answer after" in str(found) else "CRASH"
        return Judgement(verdict=verdict, kind=verdict, detail=str(found))
    failures = [record.failure for record in found if record.failure is not None]
    if failures:
        return _of_failures(failures, len(found), expected.names)
    for rank, record in enumerate(found):
        for what in differences(expected, record, relative):
            warned = {text for each in found for text in each.warnings} - {*expected.warnings}
            verdict = "warned" if warned else "WRONG"
            detail = f"rank {rank}: {what}" + (f"; warnings: {warned}" if warned else "")
            return Judgement(verdict=verdict, kind=verdict, detail=detail)
    return Judgement(verdict="equal", kind="equal")


def _of_failures(failures: list[Failure], ranks: int, names: list[str]) -> Judgement:
    own = [failure for failure in failures if not failure.is_of_peer]
    first = (own or failures)[0]
    said = f"{first.phase}: {first.kind}: {first.message}"
    shape = re.sub(r"[0-9]+|'[^']*'", "", first.message)[:40]
    verdict, detail = "CRASH", f"{said}\n{first.trace}"
    if len(failures) < ranks:
        detail = f"only some ranks failed; {detail}"
    elif own and all(failure.is_refusal for failure in own):
        words = {*re.findall(r"[A-Za-z_][\w.]*", first.message)}
        if words & {*names} or any(key in first.message for key in (*_PLAN_KEYS, "aten.")):
            verdict, detail = "refused", said
        else:
            detail = f"names nothing; {detail}"
    elif any("imed out" in failure.message for failure in own):
        verdict = "HANG"
    return Judgement(verdict=verdict, kind=f"{verdict} {first.kind} {shape}", detail=detail)


def differences(expected: Record, found: Record, relative: float) -> Iterator[str]:
    """Yield what differs, in the order in which it came about."""
    for step, pair in enumerate(zip(expected.losses, found.losses, strict=True)):
        if not math.isclose(*pair, rel_tol=relative) and not all(map(math.isnan, pair)):
            yield f"loss of step {step}: {pair[1]!r}, one device {pair[0]!r}"
        yield from _tensors(
            f"step {step}: gradient of", expected.grads[step], found.grads[step], relative
        )
    for step, pair in enumerate(zip(expected.norms, found.norms, strict=True)):
        if not math.isclose(*pair, rel_tol=relative):
            yield f"norm {step}: {pair[1]!r}, one device {pair[0]!r}"
    yield from _tensors("parameter", expected.parameters, found.parameters, relative)
    yield from _tensors("buffer", expected.buffers, found.buffers, relative)
    one, other = expected.evaluation, found.evaluation
    if one is not None and not (other is not None and math.isclose(one, other, rel_tol=relative)):
        yield f"evaluation: {other!r}, one device {one!r}"
    if not torch.equal(expected.state, found.state):
        yield "state of the generator"


def _tensors(
    what: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor], relative: float
) -> Iterator[str]:
    if [*expected] != [*found]:
        yield f"{what} {sorted({*expected} ^ {*found})}: there or not, or in another order"
        return
    floats = [x for x in expected.values() if x.is_floating_point() and x.numel()]
    largest = max((float(x.nan_to_num().abs().max()) for x in floats), default=0.0)
    for name, one in expected.items():
        other = found[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"{what} {name}: {other.shape} {other.dtype}, one device {one.shape} {one.dtype}"
        elif not one.is_floating_point():
            if not torch.equal(one, other):
                yield f"{what} {name}: {other}, one device {one}"
        else:
            scale = float(one.nan_to_num().abs().max()) if one.numel() else 0.0
            # Where the true value is zero, as of a bias that a norm cancels, rounding of what
            # cancelled is left: numbers as large as those of other tensors.
            bound = relative * (scale + 1e-2 * max(largest, 1.0))
            if not torch.allclose(one, other, rtol=0, atol=bound, equal_nan=True):
                off = float((one - other).abs().max())
                yield f"{what} {name}: off by {off:.3g}, largest element {scale:.3g}"

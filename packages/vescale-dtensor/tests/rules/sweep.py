"""Sweep torch's operator database over placements, against the plain operators.

Run a quarter of it, and look at what is not right:

    python -m packages.vescale-dtensor.tests.rules.sweep --part 1/4 --json sweep-1.json

Every record of the file is one operator: how many calls had which verdict, and the calls that
were not right. ``operator_table`` makes a page of them.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from vescale_dtensor import emulate

from .device import DEVICE
from .sweep_cases import (
    OPERATORS,
    UNDISPATCHED,
    UNINITIALIZED,
    Sample,
    assignments,
    dtypes_of,
    samples_of,
)
from .sweep_verdicts import Function, Variant, Verdict, alike, judge, outs_of, plain_outcome

MESHES = ((4,), (2, 2))
NUM_SAMPLES = 4
NUM_ASSIGNMENTS = 5  # on each mesh
SECONDS_PER_OPERATOR = 60
# With a zero in the input torch divides by it, but not if the input is of a subclass.
GRADIENT_NOT_A_NUMBER = frozenset({"masked.prod"})
# torch makes them of others in C++, out of reach: the first does not write `out` if its input is
# of a subclass; the second never does for one dim.
OUT_FORGOTTEN = frozenset({"linalg.matrix_rank", "fft.ihfftn"})


class _TimedOut(BaseException):
    """Not an Exception: nothing on the way may take it for a failure of the operator."""


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TimedOut

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sweep_operator(
    op: Any,
    meshes: Sequence[DeviceMesh],
    *,
    num_samples: int = NUM_SAMPLES,
    num_assignments: int = NUM_ASSIGNMENTS,
) -> dict[str, Any]:
    """Return the record of one operator. Call it inside ``emulate(4)``."""
    record = _Record(op.formatted_name)
    started = time.monotonic()
    if op.name in UNINITIALIZED:
        return record.done(started, "its values are whatever the memory held")
    if op.name in UNDISPATCHED:
        return record.done(started, "no subclass can be given to it")
    try:
        with _limited(SECONDS_PER_OPERATOR):
            for number, dtype in enumerate(dtypes_of(op, OPERATORS.index(op))):
                samples = samples_of(op, dtype, num_samples if number == 0 else num_samples // 2)
                for index, sample in enumerate(samples):
                    rng = random.Random(f"{op.formatted_name} {dtype} {index}")
                    _sweep_sample(op, sample, meshes, rng, num_assignments, record, str(dtype))
    except _TimedOut:
        record.add("function", "", "", Verdict("hang", f"over {SECONDS_PER_OPERATOR} s"))
    return record.done(started, "" if record.total else "no sample has dense tensor arguments")


class _Record:
    """Verdicts of one operator, as they are written to the file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.total = 0
        self.random = False
        self.counts: dict[str, Counter[str]] = {}
        self.not_right: list[dict[str, str]] = []
        self.plain_fails: Counter[str] = Counter()

    def add(self, variant: str, dtype: str, where: str, verdict: Verdict) -> None:
        self.total += 1
        counts = self.counts.setdefault(variant, Counter())
        counts[verdict.kind] += 1
        if verdict.kind == "right":
            counts["bitwise"] += "bits" not in verdict.differs
            counts["restrided"] += "strides" in verdict.differs
        counts["gathered"] += verdict.gathered
        if verdict.kind != "right":
            self.not_right.append({
                "variant": variant, "dtype": dtype, "where": where, "kind": verdict.kind,
                "detail": verdict.detail,
            })  # fmt: skip

    def done(self, started: float, skipped: str) -> dict[str, Any]:
        return {
            "operator": self.name,
            "skipped": skipped,
            "random": self.random,
            "counts": {variant: dict(counts) for variant, counts in self.counts.items()},
            "not_right": self.not_right,
            "plain_fails": dict(self.plain_fails),
            "seconds": round(time.monotonic() - started, 2),
        }


def _sweep_sample(
    op: Any,
    sample: Sample,
    meshes: Sequence[DeviceMesh],
    rng: random.Random,
    num_assignments: int,
    record: _Record,
    dtype: str,
) -> None:
    variants: list[tuple[Variant, Function]] = [("function", op.op)]
    if op.inplace_variant is not None:
        variants.append(("inplace", op.inplace_variant))
    if op.supports_out and op.name not in OUT_FORGOTTEN:
        variants.append(("out", op.op))
    for variant, function in variants:
        try:
            expected, differentiate = _expected(
                function,
                sample,
                variant,
                record,
                can_differentiate=op.name not in GRADIENT_NOT_A_NUMBER,
            )
        except Exception as problem:
            record.plain_fails[f"{variant}: {type(problem).__name__}: {problem}"[:200]] += 1
            continue
        for mesh in meshes:
            count = num_assignments if variant == "function" else max(2, num_assignments // 2)
            for assignment in assignments(sample, mesh, rng, count):
                out, resized = None, False
                if variant == "out":
                    cut = rng.choice((Replicate(), Shard(0)))
                    rest = (Replicate(),) * (mesh.ndim - 1)
                    resized = expected.resizes and rng.random() < 0.25
                    out = outs_of(expected.results[1], mesh, (cut, *rest), resized=resized)
                verdict = judge(
                    function, sample, mesh, assignment, variant, expected,
                    differentiate=differentiate, out=out, strides=not resized,
                )  # fmt: skip
                shapes = [tuple(t.shape) for t in sample.tensors]
                where = f"mesh {tuple(mesh.shape)} of {shapes}: {assignment}"
                record.add(variant, dtype, where, verdict)


def _expected(
    function: Function,
    sample: Sample,
    variant: Variant,
    record: _Record,
    *,
    can_differentiate: bool,
) -> tuple[Any, bool]:
    """Return the outcome on one device, and whether gradients are part of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if variant == "out":
            made = plain_outcome(function, sample, "function", differentiate=False)
            empty = _written(function, sample, made.results, resized=True)
            made.results = _written(function, sample, made.results, resized=False)
            assert made.results is not None
            made.resizes = empty is not None
            return made, False
        try:
            found = (
                plain_outcome(function, sample, variant, differentiate=can_differentiate),
                can_differentiate,
            )
        except Exception:
            found = plain_outcome(function, sample, variant, differentiate=False), False
        other = plain_outcome(function, sample, variant, differentiate=False, seed=1)
        same = pytree.tree_map(alike, found[0].results, other.results)
        record.random |= not all(pytree.tree_leaves(same))
        return found


def _written(function: Function, sample: Sample, results: Any, *, resized: bool) -> Any:
    """Return what an operator returns and writes; None if it cannot have empty `out`."""
    args, kwargs = sample.build([t.clone() for t in sample.tensors])
    out = pytree.tree_map_only(
        torch.Tensor,
        lambda t: torch.full((0,) if resized else t.shape, 3, dtype=t.dtype),
        results,
    )
    torch.manual_seed(0)
    with torch.no_grad(), suppress(*[RuntimeError] * resized):
        return function(*args, **kwargs, out=out), out
    return None


def main() -> None:
    """Sweep what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="which part of the operators, as 2/4")
    parser.add_argument("--json", type=Path, required=True, help="records, one a line, are added")
    parser.add_argument("--only", nargs="*", help="names of operators")
    options = parser.parse_args()
    part, num_parts = map(int, options.part.split("/"))
    chosen = OPERATORS[part - 1 :: num_parts]
    if options.only is not None:
        chosen = [op for op in OPERATORS if {op.name, op.formatted_name} & set(options.only)]
    known: set[str] = set()
    if options.json.exists():
        lines = options.json.read_text(encoding="utf-8").splitlines()
        known = {json.loads(line)["operator"] for line in lines}
    torch.set_num_threads(1)
    with emulate(4), options.json.open("a", encoding="utf-8") as file:
        meshes = [init_device_mesh(DEVICE, shape) for shape in MESHES]
        for op in chosen:
            if op.formatted_name in known:
                continue
            record = sweep_operator(op, meshes)
            file.write(json.dumps(record) + "\n")
            file.flush()


if __name__ == "__main__":
    main()

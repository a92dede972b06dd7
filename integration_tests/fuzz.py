"""Random small modules under random plans, next to one device; what fails is made small.

    python -m integration_tests.fuzz --seed 17             # one case
    python -m integration_tests.fuzz --seeds 0:200         # many
    python -m integration_tests.fuzz --case '{"tp": 2}'    # what a failure printed

A case is a flat description: what is not named has its value in ``DEFAULTS``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from vescale_testing import World

from . import fuzz_model
from .fuzz_layers import LAYERS, NORMS, POINTWISE
from .fuzz_model import BETWEEN, LOSSES, STEMS
from .judge import BAD, Judgement, Trial, attempts, compare, one_device
from .plans import COPIES, DP, PARTS, PP, SCHEDULE, SEQUENCE, TP, VIRTUAL, ZERO, Constraints

Spec = dict[str, Any]
RELATIVE = 1e-11  # of float64, after sums over ranks and a few steps
IN_SINGLE = 1e-5  # where some parameters, and so their gradients, are of float32
DEFAULTS: Spec = {
    # The model.
    "stem": "linear", "positions": "none", "width": 8, "heads": 2, "blocks": "mlp+mlp",
    "norm": "layer", "post_norm": False, "reparametrized": "no", "activation": "gelu",
    "bias": True, "scale": "none", "dropout": 0.0, "tie": "none", "twice": False,
    "second_head": False, "unused": "none", "frozen": "none", "layout": "rows",
    "closure": False, "numpy": False, "functional": False, "in_place": False,
    "checkpoint": False,
    "counter": "none", "skips_by_step": False, "auxiliary": False, "long_skip": False,
    "strided": False, "loss": "squares", "time": 4, "experts": 3, "between": "none",
    "single": False, "branches": "none",
    # The loop.
    "rows_of_a_part": 2, "steps": 2, "optimizer": "sgd", "loader": True, "accumulate": 1,
    "clip": False,
    # The plan.
    "dp": 1, "zero": 0, "copies": 1, "tp": 1, "policy": "auto", "sequence": False, "pp": 1,
    "parts": 1, "schedule": "1f1b", "virtual": 1, "recompute": "none", "overlap": 1,
}  # fmt: skip
# (how often, choices) for what is drawn alike for every plan.
_CHOICES: dict[str, tuple[float, tuple[Any, ...]]] = {
    "stem": (0.6, (*STEMS,)),
    "positions": (0.4, ("parameter", "embedding", "buffer")),
    "width": (0.3, (6, 7, 12)),
    "norm": (0.4, (*NORMS,)),
    "post_norm": (0.2, (True,)),
    "reparametrized": (0.1, ("weight", "spectral")),
    "activation": (0.4, ("relu", "silu", "prelu", "tanh")),
    "bias": (0.3, (False,)),
    "scale": (0.4, ("layer", "scalar")),
    "dropout": (0.25, (0.1, 0.5)),
    "tie": (0.25, ("head", "layers", "blocks")),
    "twice": (0.1, (True,)),
    "second_head": (0.15, (True,)),
    "unused": (0.1, ("module", "parameter")),
    "frozen": (0.2, ("stem", "block", "norms", "matrices")),
    "closure": (0.07, (True,)),
    "functional": (0.1, (True,)),
    "in_place": (0.12, (True,)),
    "checkpoint": (0.12, (True,)),
    "counter": (0.1, ("buffer", "attribute")),
    "numpy": (0.05, (True,)),
    "skips_by_step": (0.08, (True,)),
    "auxiliary": (0.1, (True,)),
    "long_skip": (0.1, (True,)),
    "strided": (0.1, (True,)),
    "loss": (0.7, (*LOSSES,)),
    "rows_of_a_part": (0.4, (1, 3)),
    "steps": (0.3, (3,)),
    "optimizer": (0.5, ("adamw",)),
    "loader": (0.25, (False,)),
    "recompute": (0.2, ("full",)),
}  # fmt: skip
# The same, drawn behind all else, so that a seed's case keeps what it had before there was more.
_MORE: dict[str, tuple[float, tuple[Any, ...]]] = {
    "time": (0.2, (1, 3, 5)),
    "experts": (0.1, (1, 2)),
    "between": (0.15, tuple(BETWEEN)),
    "single": (0.1, (True,)),
    "accumulate": (0.15, (2,)),
    "clip": (0.3, (True,)),
    "branches": (0.1, ("hidden", "layer")),
}
_KINDS = (
    "dp",
    "zero",
    "tp",
    "tp",
    "sequence",
    "pp",
    "pp",
    "tp-dp",
    "pp-dp",
    "pp-tp",
    "hybrid",
    "tp4",
)


def drawn(seed: int) -> Spec:
    """Return the case of a seed."""
    rng = random.Random(seed)
    spec = dict(DEFAULTS)
    spec |= _some(_CHOICES, rng)
    kinds = [rng.choice([*LAYERS]) for _ in range(rng.choice((2, 2, 3)))]
    if rng.random() < 0.6:
        kinds = kinds[:1] * len(kinds)
    if rng.random() < 0.15 and all(kind in POINTWISE for kind in kinds):
        spec["layout"] = rng.choice(("time", "folded"))
    spec |= _plan(rng)
    while len(kinds) < spec["pp"] * spec["virtual"]:
        kinds.append(rng.choice(kinds))
    spec["blocks"] = "+".join(kinds)
    spec["heads"] = rng.choice([h for h in (1, 2, 3, 4, 6, 7) if spec["width"] % h == 0])
    return allowed(spec | _some(_MORE, rng))


def _some(choices: Mapping[str, tuple[float, tuple[Any, ...]]], rng: random.Random) -> Spec:
    return {
        name: rng.choice(values) for name, (often, values) in choices.items()
        if rng.random() < often
    }  # fmt: skip


def _plan(rng: random.Random) -> Spec:
    kind = rng.choice(_KINDS)
    plan: Spec = {}
    if "dp" in kind or kind in {"zero", "hybrid"}:
        plan |= {"dp": 2, "zero": rng.choice((0, 1, 2, 3))}
    if kind == "hybrid":
        plan |= {"dp": 4, "copies": rng.choice((1, 2))}
    if "tp" in kind or kind == "sequence":
        plan |= {
            "tp": 4 if kind == "tp4" else 2,
            "policy": rng.choice(("auto", "auto", "megatron")),
            "sequence": kind == "sequence" or rng.random() < 0.2,
            "overlap": 2 if rng.random() < 0.1 else 1,
        }
    if "pp" in kind:
        schedule = rng.choice(("1f1b", "gpipe", "interleaved_1f1b"))
        plan |= {"pp": 2, "schedule": schedule, "parts": rng.choice((1, 2, 4))}
        if schedule == "interleaved_1f1b":
            plan |= {"virtual": 2, "parts": rng.choice((2, 4))}
    return plan


def allowed(spec: Spec) -> Spec:
    """Take away what the documentation says is not one device's."""
    spec = dict(spec)
    parts = spec["dp"] * spec["parts"]
    if spec["pp"] > 1:
        # Micro-batches draw one after the other, and are calls of their own to a counter.
        spec |= {"dropout": 0.0, "counter": "none", "numpy": False}
    if spec["norm"] == "batch" and spec["rows_of_a_part"] * parts == 1:
        spec["norm"] = "layer"
    if "experts" in spec["blocks"] and spec["dp"] > 1:
        spec["branches"] = "none"  # of tokens that are sent to an expert, which are no rows
    if spec["stem"] == "patches":
        spec["time"] = DEFAULTS["time"]
    if spec["time"] == 1:
        spec["norm"] = "layer" if spec["norm"] in {"batch", "instance"} else spec["norm"]
        spec["loss"] = "tokens" if spec["loss"] in {"shifted", "contrast"} else spec["loss"]
    if spec["single"]:
        spec["scale"] = "layer"
    if spec["layout"] == "folded":
        spec["between"] = "none"
    if spec["layout"] != "rows" and spec["norm"] not in {"layer", "rms", "own_rms", "none"}:
        spec["norm"] = "layer"
    return spec


def ranks_of(spec: Spec) -> int:
    return spec["dp"] * spec["tp"] * spec["pp"]


def constraints_of(spec: Spec) -> Constraints:
    plan: dict[str, Any] = {
        DP: spec["dp"], ZERO: spec["zero"], COPIES: spec["copies"], TP: spec["tp"],
        SEQUENCE: spec["sequence"], "tensor_parallel.sharding_policy": spec["policy"],
        "tensor_parallel.overlap": spec["overlap"], PP: spec["pp"], PARTS: spec["parts"],
        SCHEDULE: spec["schedule"], VIRTUAL: spec["virtual"], "recompute": spec["recompute"],
    }  # fmt: skip
    return plan


def trial_of(spec: Spec) -> Trial:
    rows = spec["rows_of_a_part"] * spec["dp"] * spec["parts"]
    whole = {**spec, "rows": rows}
    return Trial(
        build=partial(fuzz_model.build, whole),
        batches=partial(fuzz_model.batches, whole),
        optimizer=spec["optimizer"],
        loader=spec["loader"],
        accumulate=spec["accumulate"],
        clip=0.2 if spec["clip"] else None,
    )


def judged(worlds: Mapping[int, World], spec: Spec) -> Judgement:
    """Run a case on one device and under its plan."""
    trial, plan = trial_of(spec), constraints_of(spec)
    expected = one_device(trial)
    found = attempts(worlds[ranks_of(spec)], trial, plan)
    return compare(expected, found, relative=IN_SINGLE if spec["single"] else RELATIVE)


def shrunk(spec: Spec, is_same: Callable[[Spec], bool]) -> Spec:
    """Set to its default whatever may be without another outcome."""
    changed = True
    while changed:
        changed = False
        for simpler in _simpler(spec):
            if ranks_of(simpler) in {2, 4} and is_same(simpler):
                spec, changed = simpler, True
                break
    return spec


def _simpler(spec: Spec) -> Iterator[Spec]:
    yield from (
        allowed({**spec, "copies": 1, "dp": dp, "tp": tp, "pp": pp, "parts": parts, **flat})
        for dp, tp, pp in ((1, 1, 2), (1, 2, 1), (2, 1, 1))
        for parts, flat in (
            (spec["parts"], {}),
            (1, {"virtual": 1, "schedule": "1f1b"}),
        )
        if (dp, tp, pp) != (spec["dp"], spec["tp"], spec["pp"])
        and dp <= spec["dp"] and tp <= spec["tp"] and pp <= spec["pp"]
    )  # fmt: skip
    kinds = spec["blocks"].split("+")
    shorter = ["+".join(kinds[:i] + kinds[i + 1 :]) for i in range(len(kinds))]
    shorter += [
        "+".join(["mlp" if i == j else k for j, k in enumerate(kinds)]) for i in range(len(kinds))
    ]
    for blocks in shorter:
        if blocks and blocks != spec["blocks"]:
            yield {**spec, "blocks": blocks}
    for name, value in DEFAULTS.items():
        if spec[name] != value and name not in {"dp", "tp", "pp", "blocks"}:
            yield {**spec, name: value}


def told(spec: Spec) -> str:
    """Return a case as a line: what of it is not the default."""
    return json.dumps({name: value for name, value in spec.items() if value != DEFAULTS[name]})


def read(line: str) -> Spec:
    given = json.loads(line)
    unknown = {*given} - {*DEFAULTS}
    if unknown:
        raise ValueError(f"a case has {sorted(DEFAULTS)}, got {sorted(unknown)}")
    return {**DEFAULTS, **given}


def search(
    worlds: Mapping[int, World],
    seeds: range,
    *,
    seconds: float,
    avoid: Mapping[str, list[Any]] | None = None,
    shrinks: bool = True,
) -> list[tuple[int, Spec, Judgement]]:
    """Judge cases until the time is over; return those that failed, made small."""
    failed: list[tuple[int, Spec, Judgement]] = []
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        spec = drawn(seed)
        spec |= {
            name: DEFAULTS[name] for name, values in (avoid or {}).items() if spec[name] in values
        }
        judgement = judged(worlds, spec)
        counts[judgement.verdict] += 1
        if judgement.verdict in BAD:
            if shrinks:
                spec, judgement = _made_small(worlds, spec, judgement, deadline)
            failed.append((seed, spec, judgement))
            print(
                f"seed {seed}: {judgement.verdict} {told(spec)}\n    {judgement.detail}",
                flush=True,
            )
    print(f"{sum(counts.values())} cases from seed {seeds.start}: {dict(counts)}", flush=True)
    return failed


def _made_small(
    worlds: Mapping[int, World], spec: Spec, judgement: Judgement, deadline: float
) -> tuple[Spec, Judgement]:
    seen = {told(spec): judgement}

    def is_same(simpler: Spec) -> bool:
        if time.monotonic() > deadline:
            return False
        line = told(simpler)
        if line not in seen:
            seen[line] = judged(worlds, simpler)
        return seen[line].kind == judgement.kind

    small = shrunk(spec, is_same)
    return small, seen[told(small)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:100", help="first:last")
    parser.add_argument("--case", help="what a failure printed")
    parser.add_argument(
        "--avoid", default="{}", help="values that are replaced by the default, as JSON"
    )
    parser.add_argument("--whole", action="store_true", help="print failures as they are")
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    worlds = {size: World(size) for size in (2, 4)}
    try:
        if options.case or options.seed is not None:
            spec = read(options.case) if options.case else drawn(options.seed)
            judgement = judged(worlds, spec)
            print(f"{judgement.verdict} {told(spec)}\n{judgement.detail}")
            return
        first, last = map(int, options.seeds.split(":"))
        search(
            worlds, range(first, last), seconds=options.seconds,
            avoid=json.loads(options.avoid), shrinks=not options.whole,
        )  # fmt: skip
    finally:
        for world in worlds.values():
            world.close()


if __name__ == "__main__":
    main()

"""Random modules under random plans are right, refused or warned of; see ``fuzz``."""

from __future__ import annotations

import os

import pytest

from vescale_testing import World

from .fuzz import DEFAULTS, drawn, judged, read, search, shrunk, told
from .judge import BAD, judge
from .test_coupled_rows import of_loss

# ``nox -s nightly`` begins elsewhere every night.
FIRST = int(os.environ.get("VESCALE_FUZZ_FIRST", "1000"))
CASES, CHUNK = 2000, 50
# What the search has found, made small.
FOUND = [
    # Buffers that forward changes, when forward runs again in backward.
    '{"norm": "batch", "tp": 2, "recompute": "full"}',
    '{"reparametrized": "spectral", "tp": 2, "recompute": "full"}',
    # Statistics of a part of the sequence.
    '{"norm": "batch", "tp": 2, "sequence": true}',
    # Dropout inside of what the model itself runs again in backward.
    '{"dropout": 0.5, "checkpoint": true, "loader": false, "dp": 2}',
    # One row or head a rank, and activations whose memory has time outermost.
    '{"heads": 1, "blocks": "multihead+multihead", "dropout": 0.5, "rows_of_a_part": 1, "dp": 2}',
    '{"blocks": "multihead", "dropout": 0.5, "rows_of_a_part": 1, "dp": 2}',
    '{"blocks": "encoder", "dropout": 0.1, "tp": 2}',
    '{"blocks": "encoder", "dropout": 0.1, "loader": false, "tp": 2}',
    # A loss that is another one for a part of the batch without a target that counts.
    '{"blocks": "mlp", "loss": "ignoring", "rows_of_a_part": 1, "dp": 2}',
    '{"loss": "ignoring", "rows_of_a_part": 1, "pp": 2, "parts": 2}',
    # Batches of the loader that the program keeps in a list.
    '{"blocks": "mlp", "loss": "contrast", "rows_of_a_part": 1, "dp": 2}',
    # A parameter that is read outside of its block, in a loss over the whole batch.
    '{"functional": true, "loss": "sum", "dp": 2, "zero": 3}',
    # The block that cuts the sequence is left out.
    '{"skips_by_step": true, "tp": 2, "sequence": true}',
    '{"skips_by_step": true, "loss": "last_token", "tp": 2, "sequence": true}',
    # Buffers of stages that a rank does not run.
    '{"norm": "batch", "pp": 2}',
    # A proof within the first call draws from numpy, too.
    '{"numpy": true, "loader": false, "tp": 2}',
    # A rank without a position of the sequence, which torch draws nothing for.
    '{"dropout": 0.5, "time": 3, "tp": 4, "sequence": true}',
    '{"dropout": 0.5, "layout": "time", "rows_of_a_part": 1, "tp": 2, "sequence": true}',
    # Buffers that change in backward, where the model runs its forward again.
    '{"reparametrized": "spectral", "checkpoint": true, "pp": 2}',
    # A block under two names.
    '{"blocks": "mlp+mlp+mlp", "tie": "blocks", "tp": 2}',
    # A parameter of the model itself, on all stages, that nothing uses.
    '{"unused": "parameter", "pp": 2, "optimizer": "adamw"}',
    # Code between blocks sees a part of the sequence.
    '{"auxiliary": true, "tp": 2, "sequence": true}',
    '{"time": 5, "between": "cumsum", "tp": 2, "sequence": true}',
    # Errors that name nothing, or are not vescale's.
    '{"reparametrized": "weight", "tp": 2, "policy": "megatron"}',
    '{"tie": "blocks", "loader": false, "tp": 2}',
    '{"functional": true, "dp": 2, "zero": 2}',
    # Key-value heads that ranks share, where equal blocks are not cut alike.
    '{"blocks": "grouped+grouped", "functional": true, "tp": 4}',
    # Programs write into what a sum over ranks returns.
    '{"blocks": "mlp", "bias": false, "in_place": true, "tp": 4}',
    # One token a rank.
    '{"blocks": "mlp", "loss": "ignoring", "time": 1, "rows_of_a_part": 1, "dp": 2}',
    '{"stem": "padded_embedding", "loss": "ignoring", "time": 1, "rows_of_a_part": 1, "dp": 2}',
    # A branch by a number of all rows, beside a norm over them; of numbers that are none.
    '{"blocks": "mlp", "norm": "batch", "branches": "layer", "rows_of_a_part": 1, "dp": 2}',
    '{"blocks": "experts", "layout": "time", "branches": "hidden", "tp": 2}',
]


@pytest.fixture
def worlds(world2: World, world4: World) -> dict[int, World]:
    return {2: world2, 4: world4}


@pytest.mark.by_day("4", "6", "7", "8", "15")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_random_module_is_right_or_refused(worlds: dict[int, World], seed: int) -> None:
    spec = drawn(seed)
    judgement = judged(worlds, spec)
    assert judgement.verdict not in BAD, f"{told(spec)}\n{judgement.detail}"


@pytest.mark.by_day(
    '*"blocks": "multihead"*',
    '*"parts": 2*',
    '{"skips_by_step": true, "tp": 2, "sequence": true}*',
    '*"norm": "batch"*"pp": 2*',
    '*"numpy": true*',
    '*"checkpoint": true*"pp": 2*',
    '*"zero": 2*',
    '*"bias": false*',
)
@pytest.mark.slow
@pytest.mark.parametrize("line", FOUND)
def test_what_was_found_stays_mended(worlds: dict[int, World], line: str) -> None:
    judgement = judged(worlds, read(line))
    assert judgement.verdict not in BAD, judgement.detail


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(FIRST, FIRST + CASES, CHUNK))
def test_many_random_modules_are_right_or_refused(worlds: dict[int, World], first: int) -> None:
    failed = search(worlds, range(first, first + CHUNK), seconds=240)
    report = [
        f"seed {seed}: {judgement.verdict} {told(spec)}\n{judgement.detail}"
        for seed, spec, judgement in failed
    ]
    assert not report, "\n\n".join(report)


def test_a_seed_and_its_line_are_one_case() -> None:
    for seed in range(20):
        assert read(told(drawn(seed))) == drawn(seed)


def test_a_case_is_made_as_small_as_its_outcome_allows() -> None:
    large = {**DEFAULTS, "tp": 2, "dp": 2, "zero": 3, "blocks": "conv+gated+mlp", "bias": False}
    small = shrunk(large, lambda spec: spec["dp"] == 2 and "gated" in spec["blocks"])
    assert {k: v for k, v in small.items() if v != DEFAULTS[k]} == {"dp": 2, "blocks": "gated"}


@pytest.mark.slow
def test_the_judge_sees_what_is_wrong(worlds: dict[int, World]) -> None:
    """A plan for other rows than one device's: the judge must not be blind."""
    trial, other = of_loss("mean", 8), of_loss("mean", 6)
    assert judge(worlds, trial, 2, {"data_parallel.size": 2}).verdict == "equal"
    judgement = judge(worlds, trial, 2, {"data_parallel.size": 2}, under=other)
    assert judgement.verdict == "WRONG"

"""Targets are counted in later batches without forward, or by running it: never wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._loss.token_mean import TokenCounts
from vescale_parallel._pipeline.cuts.placeholders import placeholder
from vescale_parallel._pipeline.targets import Form, SeenCounts, TargetCounts
from vescale_parallel._pipeline.targets.replay import CountRecorder

ROWS, LENGTH, CLASSES = 3, 6, 5
Forward = Callable[[Mapping[str, Tensor]], object]


def batches(count: int = 4) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        labels = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
        ignored = torch.rand(ROWS, LENGTH, generator=generator) < 0.4
        labels[ignored] = -100
        mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.7).long()
        weights = torch.rand(CLASSES, generator=generator)
        yield {"labels": labels, "mask": mask, "weights": weights}


def logits(length: int = LENGTH) -> Tensor:
    return placeholder((ROWS * length, CLASSES), torch.float32, torch.device("cpu"))


def viewed(batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits(), batch["labels"].view(-1))


def shifted(batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits(LENGTH - 1), batch["labels"][:, 1:].contiguous().view(-1))


def padded(batch: Mapping[str, Tensor]) -> Tensor:
    labels = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].to(logits().device)
    return F.nll_loss(logits(), labels.reshape(-1), ignore_index=2)


def masked(batch: Mapping[str, Tensor]) -> Tensor:
    labels = torch.where(
        batch["mask"] == 0, torch.full_like(batch["labels"], -100), batch["labels"]
    )
    return F.cross_entropy(logits(), labels.flatten())


def written(batch: Mapping[str, Tensor]) -> Tensor:
    labels = batch["labels"].new_zeros(batch["labels"].shape)
    labels[:, :-1] = batch["labels"][:, 1:].clone()
    labels[:, -1].fill_(-100)
    labels.masked_fill_(labels == 3, -100)
    return F.cross_entropy(logits(), labels.view(-1))


def several(batch: Mapping[str, Tensor]) -> Tensor:
    half, rest = batch["labels"].chunk(2, dim=1)
    one = F.cross_entropy(logits(LENGTH // 2), half.flatten(), weight=batch["weights"])
    return one + nn.CrossEntropyLoss(ignore_index=1)(logits(LENGTH // 2), rest.flatten())


@pytest.mark.parametrize("forward", [viewed, shifted, padded, masked, written, several])
def test_later_batches_are_counted_without_forward(forward: Forward) -> None:
    counted, runs = by_both(forward, batches())
    assert runs == 1
    assert all(ours == plain for ours, plain in counted)


BUFFER = torch.arange(float(CLASSES))


def asks_for_values(batch: Mapping[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    if (labels == -100).sum() > 6:
        labels = labels[:, 1:]
    return F.cross_entropy(logits(labels.shape[1]), labels.flatten())


def asks_for_a_list(batch: Mapping[str, Tensor]) -> Tensor:
    kept = [x for x in batch["labels"].flatten().tolist() if x != 3]
    scores = placeholder((len(kept), CLASSES), torch.float32, torch.device("cpu"))
    return F.cross_entropy(scores, torch.tensor(kept))


def weighted_by_a_buffer(batch: Mapping[str, Tensor]) -> Tensor:
    BUFFER.add_(1)
    return F.cross_entropy(logits(), batch["labels"].flatten(), weight=BUFFER)


def picked(batch: Mapping[str, Tensor]) -> Tensor:
    labels = batch["labels"][batch["mask"] == 1]
    scores = placeholder((labels.shape[0], CLASSES), torch.float32, torch.device("cpu"))
    return F.cross_entropy(scores, labels)


def of_a_module(batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits(), logits().argmax(-1) + 0 * batch["labels"].flatten())


def in_the_batch(batch: Mapping[str, Tensor]) -> Tensor:
    batch["labels"][batch["labels"] == 2] = -100
    return F.cross_entropy(logits(), batch["labels"].view(-1))


def by_numpy(batch: Mapping[str, Tensor]) -> Tensor:
    kept = torch.from_numpy(batch["labels"].numpy() % 3)
    return F.cross_entropy(logits(), kept.flatten())


def drawn(batch: Mapping[str, Tensor]) -> Tensor:
    labels = batch["labels"].masked_fill(torch.rand(ROWS, LENGTH) < 0.5, -100)
    return F.cross_entropy(logits(), labels.flatten())


@pytest.mark.parametrize(
    "forward",
    [asks_for_a_list, weighted_by_a_buffer, of_a_module, in_the_batch, by_numpy, drawn],
)
def test_forward_runs_where_targets_do_not_follow_from_the_batch(forward: Forward) -> None:
    counted, runs = by_both(forward, batches())
    assert runs == 4
    assert all(ours == plain for ours, plain in counted)


def test_shapes_that_depend_on_values_are_those_that_were_seen() -> None:
    given = [*batches()]
    sizes = {int(batch["mask"].sum()) for batch in given}
    counted, runs = by_both(picked, given)
    assert runs == len(sizes)
    assert all(ours == plain for ours, plain in counted)


def test_questions_for_values_are_asked_again() -> None:
    few, many, *_ = batches()
    few["labels"][few["labels"] == -100], many["labels"][:] = 1, -100
    many["labels"][0] = 2
    counted, runs = by_both(asks_for_values, [few, many] * 3)
    assert runs == 2, "one for each answer"
    assert all(ours == plain for ours, plain in counted)


def test_questions_about_constants_are_no_part_of_the_program() -> None:
    def forward(batch: Mapping[str, Tensor]) -> Tensor:
        positions = torch.arange(LENGTH).cumsum(-1)
        assert (positions >= 0).all()
        return F.cross_entropy(logits(), batch["labels"].view(-1))

    (batch,) = batches(1)
    counting(forward, ((batch,), {}), recorder := CountRecorder([*batch.values()]))
    program = recorder.program()
    assert program is not None
    assert len(program.calls) == 1


def test_one_tensor_that_is_given_twice_is_not_taken_for_two() -> None:
    def second(pair: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits(), pair["b"].flatten())

    first, other, *_ = [batch["labels"] for batch in batches()]
    counted, runs = by_both(second, [{"a": first, "b": first}, {"a": first, "b": other}])
    assert runs == 2
    assert all(ours == plain for ours, plain in counted)


def test_arguments_of_other_values_are_other_forms() -> None:
    def ignoring(batch: Mapping[str, Any]) -> Tensor:
        return F.cross_entropy(logits(), batch["labels"].flatten(), ignore_index=batch["ignored"])

    given = [{**batch, "ignored": index} for index, batch in enumerate(batches())]
    counted, runs = by_both(ignoring, [*given, *given])
    assert runs == 4
    assert all(ours == plain for ours, plain in counted)


def test_inference_mode_runs_forward() -> None:
    with torch.inference_mode():
        counted, runs = by_both(viewed, batches())
    assert runs == 4
    assert all(ours == plain for ours, plain in counted)


def by_both(
    forward: Callable[[Any], object], given: Sequence[Any] | Iterator[Any]
) -> tuple[list[tuple[list[float], list[float]]], int]:
    """Return counts of every batch, ours and those of a run of forward; and our number of runs."""
    runs = 0

    def run(fn: Callable[..., Any], microbatch: Any, mode: TokenCounts) -> None:
        nonlocal runs
        runs += 1
        counting(fn, microbatch, mode)

    counts, found = TargetCounts(run), list[tuple[list[float], list[float]]]()
    for batch in given:
        held = BUFFER.clone()
        seed, copied = torch.get_rng_state(), {k: copy_of(v) for k, v in batch.items()}
        ours = counts.of(forward, ((batch,), {}), Form("form"))
        torch.set_rng_state(seed)
        BUFFER.copy_(held)
        counting(forward, ((copied,), {}), mode := TokenCounts())
        found.append(([*map(float, ours)], [*map(float, mode.counts)]))
    return found, runs


def copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def counting(forward: Callable[..., Any], microbatch: Any, mode: TokenCounts) -> None:
    with torch.no_grad(), mode:
        forward(*microbatch[0], **microbatch[1])


@pytest.mark.parametrize("is_delayed", [False, True])
def test_a_step_that_counts_other_targets_is_refused(is_delayed: bool) -> None:
    seen = SeenCounts(is_delayed=is_delayed, otherwise="one device")
    five, four = torch.tensor(5.0), torch.tensor(4.0)
    seen.expect([five + four])
    seen.add(0, five)
    seen.add(0, five)
    message = r"counted other targets of its loss .*expected \[9.0\], got \[10.0\]"
    if is_delayed:
        seen.check()
        seen.expect([five])
        seen.add(0, five)
    with pytest.raises(ValueError, match=message):
        seen.check()


def test_a_step_that_computes_fewer_means_is_refused() -> None:
    seen = SeenCounts(is_delayed=True, otherwise="one device")
    seen.expect([torch.tensor(5.0)])
    with pytest.raises(ValueError, match=r"computed 0 means over targets, and 1 when"):
        seen.check()

"""Losses of a head that is cut by vocabulary are those of one device, and logits never move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)

import vescale
from vescale_dtensor import CommCounter, DTensor, Shard, strict
from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .training import whole

ROWS, LENGTH, WIDTH = 8, 6, 16
Loss = Callable[["Model", Tensor, Tensor], Tensor]


def _flat(logits_BSV: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
    return logits_BSV.view(-1, logits_BSV.size(-1)), targets_BS.view(-1)


def plain(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits_BSV, targets_BS), ignore_index=-1)


def classes_second(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.transpose(1, 2), targets_BS, ignore_index=-1)


def shifted(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    logits_BSV, targets_BS = logits_BSV[:, :-1].contiguous(), targets_BS[:, 1:].contiguous()
    return F.cross_entropy(*_flat(logits_BSV, targets_BS), ignore_index=-1)


def smoothed(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    flat = _flat(logits_BSV, targets_BS)
    return F.cross_entropy(*flat, ignore_index=-1, label_smoothing=0.1)


def weighted(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits_BSV, targets_BS), model.class_weights, ignore_index=-1)


def smoothed_and_weighted(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    flat = _flat(logits_BSV, targets_BS)
    return F.cross_entropy(*flat, model.class_weights, ignore_index=-1, label_smoothing=0.2)


def soft_capped(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    logits_BSV = 2.0 * torch.tanh(logits_BSV / 2.0)
    return F.cross_entropy(*_flat(logits_BSV, targets_BS), ignore_index=-1)


def with_z_loss(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    loss = F.cross_entropy(*_flat(logits_BSV, targets_BS), ignore_index=-1)
    return loss + 1e-2 * (logits_BSV.logsumexp(-1) ** 2).mean()


def by_token(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    flat = _flat(logits_BSV, targets_BS)
    losses = F.cross_entropy(*flat, ignore_index=-1, reduction="none")
    return losses.square().mean()


def log_probabilities(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    logits_NV, targets_N = _flat(logits_BSV, targets_BS)
    return F.nll_loss(logits_NV.log_softmax(-1), targets_N, ignore_index=-1)


def gathered_probabilities(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    places_BS1 = targets_BS.clamp(min=0).unsqueeze(-1)
    return -logits_BSV.log_softmax(-1).gather(-1, places_BS1).mean()


def scaled(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    logits_BSV = logits_BSV * model.scale.exp() + model.offsets
    return F.cross_entropy(*_flat(logits_BSV, targets_BS), ignore_index=-1)


def with_auxiliary(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    loss = F.cross_entropy(*_flat(logits_BSV, targets_BS), ignore_index=-1)
    total = torch.zeros((), dtype=loss.dtype)
    total = total + loss
    total += model.scale.square() * 0.1
    return total


def in_place(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    total = torch.zeros((), dtype=logits_BSV.dtype)
    total += F.cross_entropy(*_flat(logits_BSV, targets_BS), ignore_index=-1)
    return total


def summed(model: Model, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(logits_BSV, targets_BS), ignore_index=-1, reduction="sum")


MEANS: list[Loss] = [
    plain, classes_second, shifted, smoothed, weighted, smoothed_and_weighted, soft_capped,
    with_z_loss, by_token, log_probabilities, gathered_probabilities, scaled, with_auxiliary,
    in_place,
]  # fmt: skip


class Model(nn.Module):
    """An embedding, two blocks and a head; returns the loss, or logits too."""

    def __init__(self, vocabulary: int, *, tied: bool, loss: Loss, returns_logits: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.offsets = nn.Parameter(torch.randn(vocabulary))
        self.class_weights: Tensor
        self.register_buffer("class_weights", torch.rand(vocabulary) + 0.1)
        self.loss, self.returns_logits = loss, returns_logits

    def forward(self, ids_BS: Tensor, targets_BS: Tensor) -> Any:
        x_BSF = self.embed(ids_BS)
        for block in self.blocks:
            x_BSF = torch.tanh(block(x_BSF)) if self.returns_logits else block(x_BSF)
        logits_BSV = self.head(self.norm(x_BSF))
        loss = self.loss(self, logits_BSV, targets_BS)
        return (loss, logits_BSV) if self.returns_logits else loss


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to run once, forward and backward."""

    vocabulary: int
    loss: Loss
    tied: bool = False
    returns_logits: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out: the loss, every gradient, and what was sent for it."""

    loss: Tensor
    grads: dict[str, Tensor]
    nbytes: int = 0
    largest: int = 0


def make(case: Case) -> Model:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return Model(
            case.vocabulary, tied=case.tied, loss=case.loss, returns_logits=case.returns_logits
        )
    finally:
        torch.set_default_dtype(torch.float32)


def batch(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return ids and targets; of the first half of the rows no target counts."""
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator)
    targets_BS = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator)
    targets_BS[: ROWS // 2] = -1
    targets_BS[ROWS // 2, 1:] = -1
    targets_BS[-1, 0] = vocabulary - 1
    return ids_BS, targets_BS


PLAN: Mapping[str, str] = {"head.weight": "Shard(0)", "head.<out>": "Shard(-1)"}
TIED: Mapping[str, str] = {"embed.weight": "Shard(0)", **PLAN}


def parallelized(
    model: nn.Module, constraints: Constraints, sharding_plan: Mapping[str, str]
) -> Any:
    plan = make_plan({**constraints, "batch.global_size": ROWS})
    section = replace(
        plan.tensor_parallel, sharding_policy="manual", sharding_plan=dict(sharding_plan)
    )
    return vescale.parallelize(replace(plan, tensor_parallel=section), model)


def own_rows(tensor: Tensor, constraints: Constraints) -> Tensor:
    """Return this rank's rows: data parallelism is the axis before tensor parallelism."""
    size = constraints.get(DP, 1)
    return tensor.chunk(size)[dist.get_rank() // constraints.get(TP, 1) % size]


def run_plain(case: Case) -> Outcome:
    model = make(case)
    loss = model(*batch(case.vocabulary))
    loss.backward()
    return Outcome(loss=loss.detach(), grads=gradients(model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: whole(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None and p.grad.ne(0).any()
    }


def run_ranks(cases: Sequence[Case], constraints: Constraints) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for case in cases:
        model = parallelized(make(case), constraints, TIED if case.tied else PLAN)
        rows = [own_rows(tensor, constraints) for tensor in batch(case.vocabulary)]
        with CommCounter() as counter, Largest() as largest, strict():
            loss = model(*rows)
            assert type(loss) is Tensor
            loss.backward()
        grads = gradients(model)
        outcomes.append(
            Outcome(loss=loss.detach(), grads=grads, nbytes=counter.nbytes, largest=largest.numel)
        )
    return outcomes


class Largest(TorchDispatchMode):
    """Notes the largest memory of a plain tensor that any operator returns.

    Attributes:
        numel: How many float64 numbers it has room for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # the operators that it is made of come here
        result = func(*args, **(kwargs or {}))
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // 8)
        return result


def check(world: World, constraints: Constraints, cases: Sequence[Case]) -> None:
    """Compare loss and gradients of every case on every rank with one device."""
    expected = [run_plain(case) for case in cases]
    for found in world.run(run_ranks, cases, constraints):
        for case, outcome, wanted in zip(cases, found, expected, strict=True):
            name = case.loss.__name__
            # A few hundred float64 terms, added in another order.
            torch.testing.assert_close(outcome.loss, wanted.loss, rtol=1e-12, atol=0, msg=name)
            assert outcome.grads.keys() == wanted.grads.keys(), name
            for parameter, grad in wanted.grads.items():
                scale = float(grad.abs().max())
                torch.testing.assert_close(
                    outcome.grads[parameter], grad, rtol=0, atol=1e-12 * scale,
                    msg=f"{name} {parameter}",
                )  # fmt: skip


# 61 and 9 do not divide: ranks have other numbers of classes, the last of four has none of 9.
@pytest.mark.by_day("61")
@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [64, 61])
def test_two_ranks_have_the_loss_and_gradients_of_one(world2: World, vocabulary: int) -> None:
    check(world2, {TP: 2}, [Case(vocabulary=vocabulary, loss=loss) for loss in [*MEANS, summed]])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [64, 61, 9])
def test_four_ranks_have_the_loss_and_gradients_of_one(world4: World, vocabulary: int) -> None:
    check(world4, {TP: 4}, [Case(vocabulary=vocabulary, loss=loss) for loss in [*MEANS, summed]])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_of_which_some_count_no_target_have_the_loss_of_one(
    world4: World, zero: int
) -> None:
    cases = [Case(vocabulary=61, loss=loss) for loss in MEANS]
    check(world4, {TP: 2, DP: 2, ZERO: zero}, cases)


@pytest.mark.slow
def test_the_last_stage_of_a_pipeline_has_the_loss_of_one_device(world4: World) -> None:
    cases = [Case(vocabulary=61, loss=loss) for loss in (plain, smoothed_and_weighted, scaled)]
    check(world4, {TP: 2, PP: 2, PARTS: 4}, cases)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_tied_embedding_and_head_have_the_gradient_of_one_device(world4: World) -> None:
    cases = [
        Case(vocabulary=v, loss=loss, tied=True) for v in (64, 61) for loss in (plain, scaled)
    ]
    check(world4, {TP: 2, DP: 2}, cases)
    check(world4, {TP: 2, PP: 2, PARTS: 2}, cases[:1])


@pytest.mark.slow
def test_what_is_sent_for_a_loss_does_not_grow_with_the_vocabulary(world4: World) -> None:
    few, many = 64, 1024
    # A learned number for every class has a gradient of as many numbers, without tokens. Autograd
    # makes the gradient of a gather, and of a sum that is weighted by class, whole on every rank.
    others = (scaled, gathered_probabilities, smoothed_and_weighted)
    losses = [loss for loss in [*MEANS, summed] if loss not in others]
    cases = [Case(vocabulary=v, loss=loss) for loss in losses for v in (few, many)]
    for found in world4.run(run_ranks, cases, {TP: 4}):
        for of_few, of_many in zip(found[::2], found[1::2], strict=True):
            assert of_few.nbytes == of_many.nbytes
            # This rank's logits, or the embedding; all logits would be three times as many.
            assert of_many.largest <= max(ROWS * LENGTH // 4, WIDTH) * many


def logits_of_ranks(constraints: Constraints) -> tuple[Any, ...]:
    case = Case(vocabulary=61, loss=plain, returns_logits=True)
    model = parallelized(make(case), constraints, PLAN)
    rows = batch(61)
    model.eval()
    with torch.no_grad():
        loss, logits = model(*rows)
    assert type(loss) is Tensor
    assert isinstance(logits, DTensor)
    assert logits.placements == (Shard(2),)
    best = logits.argmax(-1)
    assert isinstance(best, DTensor)
    return loss, logits.shape, best.full_tensor(), logits.full_tensor()


@pytest.mark.slow
def test_returned_logits_are_distributed_and_have_the_values_of_one_device(world2: World) -> None:
    with torch.no_grad():
        loss, logits = make(Case(vocabulary=61, loss=plain, returns_logits=True))(*batch(61))
    for found in world2.run(logits_of_ranks, {TP: 2}):
        # Sums of 16 products, in another order.
        torch.testing.assert_close(found[0], loss, rtol=1e-13, atol=0)
        assert found[1] == logits.shape
        assert torch.equal(found[2], logits.argmax(-1))
        torch.testing.assert_close(found[3], logits, rtol=1e-12, atol=1e-14)


def loss_outside(constraints: Constraints | None) -> dict[str, Tensor]:
    """Compute the loss from what the model returned, with a term of another output."""
    model: Any = make(Case(vocabulary=61, loss=with_auxiliary, returns_logits=True))
    if constraints is not None:
        model = parallelized(model, constraints, PLAN)
    ids_BS, targets_BS = batch(61)
    inner, logits_BSV = model(ids_BS, targets_BS)
    loss = F.cross_entropy(logits_BSV.view(-1, 61), targets_BS.view(-1), ignore_index=-1)
    (loss + inner.square()).backward()
    return gradients(model)


@pytest.mark.slow
def test_a_loss_outside_of_the_model_has_the_gradients_of_one_device(world2: World) -> None:
    expected = loss_outside(None)
    for found in world2.run(loss_outside, {TP: 2}):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-13, msg=name)


def huggingface(name: str, constraints: Constraints | None) -> dict[str, Any]:
    """Run a model of transformers with labels, and return its loss, logits and gradients."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        name, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, vocab_size=64, final_logit_softcapping=2.0,
        max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.train()
    if constraints is not None:
        plan = {
            "model.embed_tokens.weight": "Shard(0)", "lm_head.weight": "Shard(0)",
            "lm_head.<out>": "Shard(-1)",
        }  # fmt: skip
        model = parallelized(model, constraints, plan)
    ids_BS, labels_BS = batch(64)
    output = model(input_ids=ids_BS, labels=labels_BS.where(labels_BS >= 0, -100), use_cache=False)
    output.loss.backward()
    return {
        "loss": output.loss.detach(), "type": type(output.loss), "best": output.logits.argmax(-1),
        "grads": gradients(model), "cut": isinstance(output.logits, DTensor),
    }  # fmt: skip


def huggingface_ranks(name: str, constraints: Constraints) -> dict[str, Any]:
    with strict():
        found = huggingface(name, constraints)
    assert found["cut"]
    assert found["type"] is Tensor
    return {**found, "best": found["best"].full_tensor()}


@pytest.mark.by_day("gemma2")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_models_of_transformers_with_labels_have_the_loss_of_one_device(
    world2: World, name: str
) -> None:
    expected = huggingface(name, None)
    for found in world2.run(huggingface_ranks, name, {TP: 2}):
        # Their loss is in float32.
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=0)
        assert torch.equal(found["best"], expected["best"])
        for parameter, grad in expected["grads"].items():
            torch.testing.assert_close(
                found["grads"][parameter], grad, rtol=1e-5, atol=1e-7, msg=parameter
            )

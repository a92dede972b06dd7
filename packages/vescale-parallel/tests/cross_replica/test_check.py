"""Where rows of a batch are coupled is found by running a model on all rows and on halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from vescale_parallel._cross_replica import call_guard
from vescale_parallel._cross_replica.batches.seen import Seen
from vescale_parallel._cross_replica.batches.small_batches import some_rows
from vescale_parallel._cross_replica.borders import (
    MeanOfParts,
    ModuleRows,
    RowCoupling,
    Rows,
    joined,
)
from vescale_parallel._cross_replica.call_guard import RowGuard
from vescale_parallel._cross_replica.dims.row_counts import num_rows_of, values_of_rows


def coupling(model: nn.Module, *args: Any, **kwargs: Any) -> RowCoupling:
    guard = RowGuard(model, lambda mine: [mine])
    found, is_checked = guard.coupling(model, args, kwargs)
    assert is_checked
    return found


class Tokens(nn.Module):
    """A model of tokens whose loss is given as a function of log probabilities."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 11)
        self.loss = loss

    def forward(self, ids: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.loss(self.head(x), targets, mask)


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (3, 5), generator=generator)
    return ids, ids.roll(1, -1), torch.ones(3, 5, dtype=torch.bool)


def token_mean(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return 2 * F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mean_of_all(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return logits.logsumexp(-1).mean() + 0.1 * logits.square().mean()


def total(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return logits.logsumexp(-1).sum()


def chosen(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return -logits.log_softmax(-1)[..., 0][mask].mean()


def quotient_of_means(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return (logits[..., 0] * mask).mean() / mask.double().mean()


def product_of_means(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return logits.square().mean() * F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def divided_by_rows(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(targets)


def added_in_place(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    loss = logits.logsumexp(-1).mean()
    loss += (logits[..., 0] * mask).mean() / mask.double().mean()
    return loss


def largest(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return logits.max()


@pytest.mark.parametrize("loss", [token_mean, mean_of_all])
def test_means_over_rows_are_averaged_by_ranks(loss: Any) -> None:
    assert not coupling(Tokens(loss), *tokens()).regions


@pytest.mark.parametrize(
    "loss",
    [total, chosen, quotient_of_means, product_of_means, added_in_place, largest],
    ids=lambda loss: loss.__name__,
)
def test_rows_meet_in_other_losses_and_nowhere_else(loss: Any) -> None:
    found = coupling(Tokens(loss), *tokens())
    assert [*found.regions] == [""]
    assert {fqn for fqn, _ in found.module_rows} == {"", "embed", "blocks.0", "blocks.1", "head"}


def test_rows_meet_in_batch_norm_while_training_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert [*coupling(model, torch.randn(6, 4)).regions] == ["1"]
    assert not coupling(model.eval(), torch.randn(6, 4)).regions


def test_rows_meet_in_batch_norm_only_before_a_module_that_writes_in_place() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU(inplace=True), nn.Linear(4, 2))
    assert [*coupling(model, torch.randn(6, 4)).regions] == ["1"]


class Weighted(nn.Module):
    """Weighs a mean by a parameter and adds decay; ``of_data`` weighs by something of the rows."""

    def __init__(self, of_data: bool) -> None:
        super().__init__()
        self.inner, self.of_data = nn.Linear(4, 4), of_data
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.log_scale.exp()
        if self.of_data:
            scale = scale.clone()
            scale += self.inner(x).square().mean()
        decay = 0.1 * sum(p.square().sum() for p in self.inner.parameters())
        return self.inner(x).square().mean() / scale + decay - self.log_scale


@pytest.mark.parametrize("of_data", [False, True])
def test_means_may_be_weighted_by_parameters(of_data: bool) -> None:
    found = coupling(Weighted(of_data), torch.randn(6, 4))
    assert [*found.regions] == ([""] if of_data else [])


class Triplets(nn.Module):
    """A loss that is 0 beyond a margin, and for groups of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        distances = torch.cdist(self.inner(x), self.inner(x))
        same = group[:, None] == group[None]
        farthest = distances.masked_fill(~same, -1e9).amax(1)
        nearest = distances.masked_fill(same, 1e9).amin(1)
        return F.relu(farthest - nearest + 0.3).mean()


@pytest.mark.parametrize("seed", [2, 28, 109, 197])
def test_rows_meet_though_few_of_them_do_not_by_chance(seed: int) -> None:
    """The nearest ones are in one half, of which groups are taken for bounds of rows."""
    torch.manual_seed(seed)
    found = coupling(Triplets(), torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    assert [*found.regions] == [""]


@pytest.mark.parametrize("groups", [[0] * 8, [0, 0, 0, 0, 1, 0, 0, 1], [0, 1] * 4])
def test_rows_meet_in_a_hinge_though_it_is_beyond_its_margin(groups: list[int]) -> None:
    found = coupling(Triplets(), torch.randn(8, 4), torch.tensor(groups))
    assert [*found.regions] == [""]


class Router(nn.Module):
    """Keeps a loss over all rows for the model to add."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        self.balance = p.mean(0).square().sum()
        return x * p[:, :1]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Router(), Router()])

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Any] = []
        for layer in self.layers:
            x = layer(x)
            kept.append(layer.balance)
        return x.square().mean() + torch.stack(kept).sum()


def test_a_loss_kept_by_a_layer_makes_the_layer_meet_too() -> None:
    assert {*coupling(Routed(), torch.randn(4, 4)).regions} == {
        *("", "layers", "layers.0", "layers.1")
    }


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.left(x) @ self.right(y).T
        return {"loss": F.cross_entropy(logits, torch.arange(len(x))), "logits": logits}


def test_what_has_rows_twice_is_returned_whole() -> None:
    found = coupling(Contrast(), torch.randn(5, 3), torch.randn(5, 3))
    assert [*found.regions] == [""]
    border = found.module_rows["", "2d 2d"]
    assert border.inputs == (Rows(0), Rows(0))
    assert border.outputs[1] is None


class TimeOutside(nn.Module):
    """Folds (batch, time) with the time outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        folded = self.inner(x.transpose(0, 1).reshape(-1, 3))
        return folded.square().sum()


def test_rows_inside_of_a_folded_dim_are_told_from_rows_outside() -> None:
    border = coupling(TimeOutside(), torch.randn(4, 5, 3)).module_rows["inner", "2d"]
    assert border.inputs == (Rows(0, outermost=False),)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(x)[0][-1]), y)


def test_rows_of_time_first_inputs_are_what_tensors_share() -> None:
    x, y = torch.randn(7, 5, 3), torch.tensor([0, 1, 0, 1, 0])
    assert num_rows_of((x, y), {}) == 5
    assert not coupling(TimeFirst(), x, y).regions


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad - grad.mean(0)


class MeetsInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(self.layer(x)).square()


def test_rows_that_meet_in_backward_alone_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gradient of 'layer.*' is not the sum over parts"):
        coupling(MeetsInBackward(), torch.randn(4, 3))


class NeedsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).norm(dim=-1).topk(3).values.mean()


def test_a_model_that_fewer_rows_do_not_fit_lets_them_meet() -> None:
    assert [*coupling(NeedsRows(), torch.randn(4, 3)).regions] == [""]


def test_dropout_does_not_let_rows_meet() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2), nn.AlphaDropout(0.1))
    assert not coupling(model, torch.randn(4, 4)).regions


def test_a_check_leaves_generators_and_the_model_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    coupling(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(v, before[1][k]) for k, v in model.state_dict().items())


def without_targets(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    ignored = targets.masked_fill(targets < 4, -100)
    counted = torch.where((ignored == -100).all(), targets, ignored)
    return F.cross_entropy(logits.mT, counted)


def without_a_call(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return logits.square().mean() if bool((targets > 6).any()) else 0 * logits.mean()


@pytest.mark.parametrize("loss", [without_targets, without_a_call])
def test_rows_meet_in_what_depends_on_there_being_a_row_of_some_kind(loss: Any) -> None:
    assert [*coupling(Tokens(loss), *tokens()).regions] == [""]


def test_a_single_token_tells_what_others_would_do() -> None:
    one = torch.full((1, 1), 7)
    whole = torch.ones(1, 1, dtype=torch.bool)
    assert [*coupling(Tokens(without_targets), one, one, whole).regions] == [""]


def test_masks_of_the_small_batch_are_uneven() -> None:
    whole, *halves = some_rows(((torch.ones(2, 8, dtype=torch.bool),), {}), 2, uneven=True)
    counts = whole[0][0].sum(1).tolist()
    assert len({*counts}) == 4
    assert torch.equal(torch.cat([half[0][0] for half in halves]), whole[0][0])


def test_ranks_that_see_rows_meet_elsewhere_agree() -> None:
    model, other = Tokens(chosen), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    theirs = RowGuard(other, lambda mine: [mine]).coupling(other, (torch.randn(4, 4),), {})[0]
    form = "ids: int 2d, mask: bool 2d, targets: int 2d"
    told = Seen(form, theirs, "", is_wrong=False, values=frozenset(), unusual=())
    ours = RowGuard(model, lambda mine: [mine, told])
    assert [*ours.coupling(model, tokens(), {})[0].regions] == ["", "1"]


def test_a_rank_may_evaluate_alone_where_rows_do_not_meet() -> None:
    guard = RowGuard(Tokens(token_mean), lambda mine: pytest.fail("the others are not there"))
    with torch.no_grad():
        assert not guard.coupling(Tokens(token_mean), tokens(), {})[0].regions


def test_targets_that_are_all_ignored_are_made_to_count() -> None:
    ids, targets, mask = tokens()
    ignored = torch.full_like(targets, -100)
    assert not coupling(Tokens(token_mean), ids, ignored, mask).regions


class WithAccuracy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return F.cross_entropy(logits, y), (logits.argmax(-1) == y).double().mean()


def test_numbers_without_gradient_matter_where_they_are_returned() -> None:
    args = torch.randn(4, 3), torch.tensor([0, 1, 2, 3])
    assert [*coupling(WithAccuracy(), *args).regions] == [""]
    guard = RowGuard(WithAccuracy(), lambda mine: [mine], losses_only=True)
    assert not guard.coupling(WithAccuracy(), args, {})[0].regions


class SquaredLoss(nn.Module):
    """Takes a mean over rows from a module and squares it, which is no mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(3, 4), nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(x), y) ** 2


def test_the_loss_of_a_module_is_the_mean_over_ranks_for_what_goes_on_with_it() -> None:
    found = coupling(SquaredLoss(), torch.randn(4, 3), torch.tensor([0, 1, 2, 3]))
    assert [*found.regions] == [""]
    assert found.module_rows["loss", "2d 1d"].outputs == (MeanOfParts(),)


def test_it_is_refused_if_time_may_be_the_rows_and_it_makes_a_difference() -> None:
    with pytest.raises(ValueError, match=r"of length 3, they depend .*; if the one of length 5"):
        coupling(Tokens(divided_by_rows), *tokens())
    guard = RowGuard(Tokens(divided_by_rows), lambda mine: [mine])
    guard.is_rows_first = lambda tree: True
    assert [*guard.coupling(Tokens(divided_by_rows), tokens(), {})[0].regions] == [""]


class AroundLlama(nn.Module):
    """Returns the loss of a transformers model, which is how loops are often written."""

    def __init__(self, *, coupled: bool) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
            vocab_size=300, use_cache=False,
        )  # fmt: skip
        self.lm, self.coupled = LlamaForCausalLM(config), coupled

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        result = self.lm(**batch)
        return result.logits.logsumexp(-1).amax() if self.coupled else result.loss


@pytest.mark.parametrize("coupled", [False, True])
def test_a_scaled_down_model_is_run_inside_of_what_wraps_it(
    monkeypatch: pytest.MonkeyPatch, coupled: bool
) -> None:
    monkeypatch.setattr(call_guard, "_MANY", 1000)
    model, ids = AroundLlama(coupled=coupled), torch.randint(0, 300, (4, 6))
    subject, is_scaled_down = RowGuard(model, lambda mine: [mine]).subject(model)
    assert is_scaled_down
    assert len(subject.lm.model.layers) == 4  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue, reportOptionalMemberAccess]
    found = coupling(model, {"input_ids": ids, "labels": ids})
    assert [*found.regions] == ([""] if coupled else [])


class Towers(nn.Module):
    """Returns features of rows, and a temperature beside them, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": self.tower(x), "scale": self.tower.bias.sum().exp()}


def test_a_number_that_is_no_mean_is_named_among_several_results() -> None:
    found = coupling(Towers(), torch.ones(4, 3))
    assert found.regions[""].endswith("not a plain mean over rows, output['scale']")


def test_what_ranks_compare_may_be_a_column_of_a_tensor() -> None:
    table = torch.arange(12.0).view(4, 3)
    column = table[:, 1]
    assert values_of_rows((column,), {}) == values_of_rows((column.clone(),), {})


def test_a_number_that_one_batch_shows_as_a_mean_leaves_rows_of_a_region_known() -> None:
    """Losses above a threshold, if there are some: rows of other batches take another branch."""
    given, at = (torch.randn(4, 3),), ("", "2d")
    mean = RowCoupling(module_rows={at: ModuleRows((Rows(0),), (MeanOfParts(), Rows(0)))})
    region = RowCoupling({"": "it picks"}, {at: ModuleRows((Rows(0),), (None, Rows(0)))})
    for found in ([mean, region], [region, mean]):
        assert joined(found).rows_of_module("", given) == region.module_rows[at]
    elsewhere = RowCoupling({"other": "it picks"}, region.module_rows)
    assert joined([mean, elsewhere]).rows_of_module("", given) is None

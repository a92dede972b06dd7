"""A plan is proven anew for calls of another form than the one that it was proven for."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import TensorParallel, propose_sharding
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._verify import equivalence
from vescale_parallel._verify.calls import call_guard
from vescale_parallel._verify.calls.call_guard import CallGuard
from vescale_parallel._verify.calls.call_signature import CallForms, proof_record, proven_forms
from vescale_parallel._verify.dry_runs import DryRuns

PLAN = {"blocks.*.up.weight": "Shard(0)", "blocks.*.down.weight": "Shard(1)"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, mask: Tensor | None, normed: bool) -> Tensor:
        h = torch.relu(self.up(x))
        if normed:
            h = h / h.norm(dim=-1, keepdim=True)
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        normed: bool = False,
        stop: Tensor | None = None,
        notes: Any = None,
    ) -> Tensor:
        for block in self.blocks:
            x = block(x, mask, normed)
        if stop is not None and float(stop) > 0:
            return -x
        return x


def guard(*, proven: bool = True) -> CallGuard:
    model = Net()
    forms = [CallForms(model).form((torch.zeros(2, 8),), {})] if proven else []
    return CallGuard(model, PLAN, shard(PLAN, model, 2), forms)


def called(
    guarded: CallGuard,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: nn.Module | None = None,
) -> None:
    with guarded.proven(model or nn.Module(), args, kwargs):
        pass


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    held = CallGuard._check

    def check_plan(self: CallGuard, model: nn.Module, named: Any) -> None:
        seen.append(", ".join(named))
        held(self, model, named)

    monkeypatch.setattr(CallGuard, "_check", check_plan)
    return seen


def test_other_sizes_are_of_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    guarded = guard()
    called(guarded, (torch.zeros(5, 8),), {})
    called(guarded, (), {"x": torch.zeros(7, 8), "mask": None, "normed": False})
    assert seen == []


def test_a_call_of_another_form_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    guarded = guard()
    for rows in (2, 3):
        called(guarded, (torch.zeros(rows, 8), torch.ones(rows, 8, dtype=torch.bool)), {})
    assert seen == ["x, mask"]


def test_a_branch_that_the_plan_breaks_is_refused_with_the_module() -> None:
    guarded = guard()
    with pytest.raises(
        ValueError, match=r"normed: True, x: float 2d.*'blocks.0', what it returns"
    ):
        called(guarded, (torch.zeros(2, 8),), {"normed": True})


def test_a_plan_that_cuts_nothing_in_blocks_is_proven_as_well() -> None:
    class WithHead(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor, stop: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.head(super().forward(x, stop=stop))

    model, plan = WithHead(), {"head.weight": "Shard(0)", "head.<out>": "Shard(-1)"}
    guarded = CallGuard(model, plan, shard(plan, model, 2), [])
    called(guarded, (torch.zeros(2, 8),), {})
    with pytest.warns(UserWarning, match="was not compared with one device for calls with"):
        called(guarded, (torch.zeros(2, 8), torch.tensor(1.0)), {})


def test_a_refused_form_stays_refused() -> None:
    guarded = guard()
    for _ in range(2):
        with pytest.raises(ValueError, match="normed"):
            called(guarded, (torch.zeros(2, 8),), {"normed": True})


def test_without_any_proof_the_first_call_is_proven() -> None:
    guarded = guard(proven=False)
    called(guarded, (torch.zeros(2, 8),), {})
    with pytest.raises(ValueError, match="normed"):
        called(guard(proven=False), (torch.zeros(2, 8),), {"normed": True})


def test_a_forward_that_needs_values_warns_once() -> None:
    guarded = guard()
    with pytest.warns(UserWarning, match=r"stop: float 0d, x: float 2d\), and cannot be"):
        called(guarded, (torch.zeros(2, 8),), {"stop": torch.tensor(1.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(guarded, (torch.zeros(2, 8),), {"stop": torch.tensor(-1.0)})


def test_a_plan_for_one_block_of_a_large_model_is_not_proven_on_a_small_one_that_lacks_it() -> (
    None
):
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, vocab_size=64))
    mlp = "model.layers.4.mlp"
    plan = {f"{mlp}.{name}_proj.weight": "Shard(0)" for name in ("gate", "up")}
    plan[f"{mlp}.down_proj.weight"] = "Shard(1)"
    guarded = CallGuard(model, plan, shard(plan, model, 2), [])
    with pytest.warns(UserWarning, match=r"model\.layers\.4 is too large to be run"):
        called(guarded, (torch.zeros(1, 4, dtype=torch.long),), {})


def test_a_model_that_cannot_be_copied_is_not_guarded() -> None:
    model = Net()
    vars(model)["lock"] = threading.Lock()
    guarded = CallGuard(model, PLAN, shard(PLAN, model, 2), [])
    called(guarded, (torch.zeros(2, 8),), {"normed": True})


def test_a_call_that_raises_is_not_warned_of() -> None:
    guarded = guard()
    args = (torch.zeros(2, 8), None)
    for stop in (torch.ones(2), torch.ones(2)):
        with (
            pytest.raises(ValueError, match="one element"),
            guarded.proven(nn.Module(), args, {"stop": stop}),
        ):
            Net()(*args, stop=stop)


def test_a_proof_is_undisturbed_by_what_the_caller_has_switched_on() -> None:
    guarded = guard()
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        called(guarded, (torch.zeros(2, 8), torch.ones(2, 8, dtype=torch.bool)), {})
    assert torch.equal(torch.get_rng_state(), before)


def test_objects_of_the_caller_are_not_changed() -> None:
    class Appends(Net):
        def forward(self, x: Tensor, notes: Any = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            notes.seen.append(x)
            return super().forward(x)

    class Notes:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    model, notes = Appends(), Notes()
    guarded = CallGuard(model, PLAN, shard(PLAN, model, 2), [])
    called(guarded, (torch.zeros(2, 8),), {"notes": notes})
    assert notes.seen == []


def test_a_gradient_that_is_a_sum_in_one_form_only_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor, inside: bool = True) -> Tensor:
            h = torch.relu(self.up(x))
            return self.down(h * self.scale) if inside else self.down(h) * self.scale

    model = Shared()
    plan = {"up.weight": "Shard(0)", "down.weight": "Shard(1)", "scale.<grad>": "Partial()"}
    guarded = CallGuard(model, plan, shard(plan, model, 2), [])
    called(guarded, (torch.zeros(2, 8),), {})
    with pytest.raises(ValueError, match=r"inside: False.*'scale', the gradient is a sum"):
        called(guarded, (torch.zeros(2, 8),), {"inside": False})


@pytest.mark.parametrize(
    ("args", "kwargs", "form"),
    [
        ((torch.zeros(2, 8),), {}, "x: float 2d"),
        ((torch.zeros(2).bfloat16(), torch.zeros(2) > 0), {}, "mask: bool 1d, x: float 1d"),
        ((), {"x": torch.zeros(1), "normed": True}, "normed: True, x: float 1d"),
        ((), {"x": [torch.zeros(1), 3], "notes": {"a": object()}},
         "notes: {a: object}, x: [float 1d, int]"),
        ((1,), {"stop": "late"}, "stop: 'late', x: int"),
    ],
)  # fmt: skip
def test_a_form_has_names_and_kinds_and_no_sizes(args: Any, kwargs: Any, form: str) -> None:
    assert CallForms(Net()).form(args, kwargs) == form


def test_a_proposal_says_what_it_was_proven_for() -> None:
    proposal = propose_sharding(Net(), "auto", 2, example_batch=torch.zeros(2, 8))
    assert proposal.plan
    assert proposal.proven_call == "x: float 2d"


def test_a_record_counts_for_the_sharding_plan_and_size_that_it_was_made_for() -> None:
    record = proof_record("x: float 2d", 2, PLAN)
    section = TensorParallel(size=2, sharding_plan=PLAN, proven_calls=(record,))
    assert proven_forms(section) == ["x: float 2d"]
    other = dict(list(PLAN.items())[:1])
    for size, plan in ((4, PLAN), (2, other)):
        section = TensorParallel(size=size, sharding_plan=plan, proven_calls=(record,))
        assert proven_forms(section) == []


class Drawing(nn.Module):
    """Scales by a number of Python's and one of numpy's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, None, False) * (0.5 + random.random())
        return x * float(0.5 + numpy.random.rand())


def test_numbers_that_a_forward_draws_on_the_host_are_alike_on_all_ranks() -> None:
    model = Drawing()
    guarded = CallGuard(model, PLAN, shard(PLAN, model, 2), [])
    held, held_by_numpy = random.getstate(), numpy.random.get_state(legacy=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(guarded, (torch.ones(2, 8),), {})
    assert random.getstate() == held
    assert repr(numpy.random.get_state(legacy=True)) == repr(held_by_numpy)


class WrongOutside(nn.Module):
    """Counts features itself, outside of any block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


def test_a_plan_that_is_wrong_outside_of_blocks_is_refused_with_the_class() -> None:
    model, plan = WrongOutside(), {"up.weight": "Shard(0)", "down.weight": "Shard(1)"}
    guarded = CallGuard(model, plan, shard(plan, model, 2), [])
    with pytest.raises(ValueError, match="in WrongOutside itself, what it returns differs"):
        called(guarded, (torch.ones(2, 8),), {})


def test_a_model_of_millions_of_parameters_is_compared_scaled_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = LlamaConfig(
                hidden_size=512,
                intermediate_size=1024,
                vocab_size=4096,
                num_hidden_layers=3,
                num_attention_heads=8,
            )
            self.model = LlamaForCausalLM(config)

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, labels=ids).loss

    compared: list[int] = []
    compare = equivalence.check_plan

    def check_plan(runs: DryRuns, *rest: Any, **named: Any) -> Any:
        compared.append(sum(p.numel() for p in runs.model.parameters()))
        return compare(runs, *rest, **named)

    monkeypatch.setattr(call_guard, "check_plan", check_plan)
    with torch.device("meta"):
        model = Wraps()
    plan = dict(propose_sharding(model, "auto", 2).plan)
    guarded = CallGuard(model, plan, shard(plan, model, 2), [])
    called(guarded, (torch.zeros(2, 8, dtype=torch.long),), {})
    assert plan
    assert 0 < compared[0] < 1 << 20


def test_a_call_with_more_than_it_names_is_an_example_by_place() -> None:
    class Remembering(Net):
        def forward(self, x: Tensor, *memories: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x + sum(memories))

    forms, x = CallForms(Remembering()), torch.ones(2, 8)
    assert forms.batch((x, x), {}) == (x, x)
    assert forms.batch((x,), {}) == {"x": x}


class Switched(nn.Module):
    """Divides by a norm of features once it is told to; counts its calls in words."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.normed, self.step = nn.Linear(8, 16), nn.Linear(16, 8), False, "0"

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h / h.norm(dim=-1, keepdim=True) if self.normed else h)


_SWITCHED = {"up.weight": "Shard(0)", "down.weight": "Shard(1)"}


def switched() -> tuple[Switched, CallGuard]:
    model = Switched()
    forms = [CallForms(model).form((torch.zeros(2, 8),), {})]
    return model, CallGuard(model, _SWITCHED, shard(_SWITCHED, model, 2), forms)


def test_a_flag_that_is_set_later_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, guarded = switched()
    seen = counted(monkeypatch)
    called(guarded, (torch.zeros(2, 8),), {}, model)
    assert not seen
    model.normed = True
    with pytest.raises(ValueError, match=r"normed True\): in Switched itself, what it returns"):
        called(guarded, (torch.zeros(2, 8),), {}, model)
    model.normed = False
    called(guarded, (torch.zeros(2, 8),), {}, model)
    assert len(seen) == 1


def test_what_counts_calls_is_compared_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, guarded = switched()
    seen = counted(monkeypatch)
    for step in range(20):
        model.step = str(step)
        called(guarded, (torch.zeros(2, 8),), {}, model)
    assert len(seen) < 6

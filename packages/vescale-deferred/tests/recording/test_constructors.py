"""What people write in constructors, against ordinary construction."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from vescale_deferred import DeferredWarning, deferred_init, is_deferred, materialize

from .modules import holder

Check = Callable[[Callable[[], nn.Module]], Any]


@pytest.mark.parametrize(
    "init",
    [
        nn.init.orthogonal_,
        nn.init.kaiming_normal_,
        nn.init.xavier_uniform_,
        nn.init.eye_,
        lambda w: nn.init.sparse_(w, 0.3),
        lambda w: nn.init.trunc_normal_(w, std=0.02),
        lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, -1.0, 1.5),
        lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 1.0, 3.0),
        lambda w: nn.init.constant_(w, 0.3),
        lambda w: w.data.exponential_(),
        lambda w: w.data.bernoulli_(0.3),
        lambda w: w.data.copy_(torch.linspace(0, 1, w.numel()).view_as(w)),
        lambda w: w.data.normal_().mul_(0.5).clamp_(-0.5, 0.5),
    ],
)
@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (3, 2)])
def test_initialisers_give_their_ordinary_values(
    init: Callable[[Tensor], object], shape: tuple[int, int], same_as_ordinary: Check
):
    def factory() -> Any:
        module = holder(w=torch.empty(shape), after=torch.rand(3))
        init(module.w)
        nn.init.uniform_(module.after)
        return module

    same_as_ordinary(factory)


def test_dirac_gives_its_ordinary_values(same_as_ordinary: Check):
    same_as_ordinary(lambda: holder(w=nn.init.dirac_(torch.empty(8, 8, 3))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_layers_of_any_dtype_have_their_ordinary_values(
    dtype: torch.dtype, same_as_ordinary: Check
):
    same_as_ordinary(
        lambda: nn.Sequential(
            nn.Linear(9, 7, dtype=dtype), nn.Embedding(20, 3, padding_idx=1, dtype=dtype)
        )
    )


def test_the_default_dtype_of_the_time_is_used(same_as_ordinary: Check):
    def factory() -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return holder(a=torch.rand(20), b=torch.arange(5) / 3)
        finally:
            torch.set_default_dtype(torch.float32)

    same_as_ordinary(factory)


class _FromMeta(nn.Module):
    """Layers that begin on the meta device, and tensors that are like one there."""

    def __init__(self) -> None:
        super().__init__()
        self.emptied = nn.Linear(4, 3, device="meta").to_empty(device="cpu")
        self.emptied.reset_parameters()
        skipped: Any = nn.utils.skip_init(nn.Linear, 3, 5)
        nn.init.orthogonal_(skipped.weight)
        nn.init.zeros_(skipped.bias)
        self.skipped = skipped
        shape = torch.empty(6, 4, device="meta")
        self.drawn = nn.Parameter(torch.randn_like(shape, device="cpu"))
        self.filled = nn.Parameter(shape.new_full((5,), 0.5, device="cpu"))
        self.register_buffer("geometry", torch.empty(0, 3))
        assert torch.empty_like(shape).is_meta


def test_what_begins_on_the_meta_device_is_deferred(same_as_ordinary: Check):
    same_as_ordinary(_FromMeta)
    deferred = deferred_init(_FromMeta)
    assert all(is_deferred(layer) for layer in (deferred.emptied, deferred.skipped))
    assert materialize(deferred).drawn.shape == (6, 4)


def test_values_that_python_asks_for_are_exact(same_as_ordinary: Check):
    def factory() -> Any:
        size = int(torch.randint(3, 9, ()))
        scale = torch.rand(4).tolist()[2]
        array = torch.rand(3).numpy()
        module = holder(
            a=torch.full((size,), scale),
            b=torch.from_numpy(array * 2),
            c=torch.rand(size) if torch.randn(4).sum() > 0 else torch.randn(size),
            d=torch.rand(9)[torch.rand(9) > 0.5],
        )
        module.drop = [x.item() for x in torch.linspace(0, 0.1, 5)]
        assert f"{torch.ones(()):.1f}" == "1.0"
        return module

    module = same_as_ordinary(factory)
    assert module.drop == [x.item() for x in torch.linspace(0, 0.1, 5)]


def test_parameters_that_view_one_base_still_do(same_as_ordinary: Check):
    def factory() -> Any:
        base = torch.rand(10, 4)
        return holder(a=base[:5], b=base[5:], c=base, d=base.t(), other=torch.rand(3))

    same_as_ordinary(factory)


def test_tied_and_copied_modules_have_their_ordinary_values(same_as_ordinary: Check):
    def factory() -> Any:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        copied = copy.deepcopy(nn.Sequential(first, second))
        first.weight.data.mul_(2)
        return nn.Sequential(first, second, copied)

    same_as_ordinary(factory)


def test_conversions_and_loading_inside_a_constructor_have_their_ordinary_values(
    same_as_ordinary: Check,
):
    def factory() -> Any:
        a, b, c = (nn.Linear(3, 3) for _ in range(3))
        a.weight.data = torch.zeros(3, 3)
        a.bias.data.copy_(b.weight[0])
        c.load_state_dict(a.state_dict())
        b.requires_grad_(False)
        halves = nn.Linear(4, 4).half()
        return nn.Sequential(a, b, c, halves, nn.Linear(2, 2).to(torch.float64))

    same_as_ordinary(factory)


def test_buffers_computed_from_values_have_their_ordinary_values(same_as_ordinary: Check):
    def factory() -> Any:
        module = nn.Module()
        positions = torch.arange(10.0).outer(1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))
        table = torch.zeros(10, 8)
        table[:, 0::2], table[:, 1::2] = positions.sin(), positions.cos()
        module.register_buffer("table", table, persistent=False)
        module.register_buffer("mask", torch.ones(5, 5).tril().bool())
        module.register_buffer("found", torch.rand(6).gt(0.5).nonzero())
        module.register_buffer("kinds", torch.unique(torch.randint(0, 4, (9,))))
        module.register_buffer("singular", torch.linalg.svd(torch.rand(4, 4)).S)
        module.register_buffer("float8", torch.rand(4, 4).to(torch.float8_e4m3fn).float())
        module.register_buffer("nothing", None)
        return module

    module = same_as_ordinary(factory)
    assert "table" not in module.state_dict()


def test_parametrizations_have_their_ordinary_values(same_as_ordinary: Check):
    same_as_ordinary(
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(8, 9)),
            parametrizations.orthogonal(nn.Linear(8, 9)),
            parametrizations.spectral_norm(nn.Linear(8, 9)),
        )
    )


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_norms_by_hooks_have_their_ordinary_values(same_as_ordinary: Check):
    same_as_ordinary(
        lambda: nn.Sequential(
            nn.utils.weight_norm(nn.Linear(3, 4)), nn.utils.spectral_norm(nn.Linear(3, 4))
        )
    )


def test_real_tensors_meet_deferred_ones(same_as_ordinary: Check):
    def factory() -> Any:
        real = torch.tensor([1.0, 2.0, 3.0])
        real.copy_(torch.rand(3))
        array = np.arange(3, dtype=np.float32)
        mixed = torch.zeros(3) + torch.from_numpy(array)
        array[:] = 7
        drawn = torch.tensor([1.0, 2.0]).normal_()
        return holder(a=real, b=mixed, c=drawn, d=torch.rand(3))

    same_as_ordinary(factory)


def test_operators_may_write_through_views_and_out_arguments(same_as_ordinary: Check):
    def factory() -> Any:
        a = torch.rand(6, 4)
        a[1:3, ::2].normal_()
        a.view(-1)[5] = 3.0
        a[a > 0.8] = 0.0
        b = torch.empty(4)
        torch.add(a[0], a[1], out=b)
        a.copy_(a)
        c = torch.empty(3, 5).t_()
        c.uniform_()
        return holder(a=a, b=b, c=c)

    same_as_ordinary(factory)


def test_plain_attributes_become_real_and_stay_the_same_objects():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))
            self.plain = torch.rand(4)
            self.nested: list[Any] = [self.weight, {"key": (self.plain, 1)}]

    torch.manual_seed(0)
    expected = Net()
    torch.manual_seed(0)
    module = deferred_init(Net)
    assert is_deferred(module.plain)
    materialize(module)
    assert torch.equal(module.plain, expected.plain)
    assert module.nested[0] is module.weight
    assert module.nested[1]["key"][0] is module.plain


def test_what_cannot_be_deferred_is_constructed_for_real_and_says_why():
    def factory() -> Any:
        random.random()
        w = torch.rand(4)
        w.resize_(2, 2)
        return holder(w=w)

    torch.manual_seed(0)
    random.seed(0)
    expected = factory()
    end, python_end = torch.get_rng_state(), random.getstate()
    torch.manual_seed(0)
    random.seed(0)
    with pytest.warns(DeferredWarning, match=r"for real.*aten::resize_.*test_constructors.py"):
        module = deferred_init(factory)
    assert torch.equal(module.w, expected.w)
    assert torch.equal(torch.get_rng_state(), end)
    assert random.getstate() == python_end


def test_sparse_tensors_stay_real_and_say_so():
    def factory() -> Any:
        module = nn.Linear(3, 3)
        module.register_buffer("sparse", torch.rand(3, 3).to_sparse())
        return module

    torch.manual_seed(0)
    expected = factory()
    end = torch.get_rng_state()
    torch.manual_seed(0)
    with pytest.warns(DeferredWarning, match="sparse.*test_constructors.py"):
        module = deferred_init(factory)
    assert torch.equal(torch.get_rng_state(), end)
    assert is_deferred(module.weight)
    assert not is_deferred(module.sparse)
    assert torch.equal(module.sparse.to_dense(), expected.sparse.to_dense())


def test_an_error_of_the_constructor_is_raised_and_the_generator_is_as_usual():
    def factory() -> Any:
        torch.rand(3)
        raise ValueError("mine")

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="mine"):
        deferred_init(factory)
    end = torch.get_rng_state()
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(torch.get_rng_state(), end)


def test_constructed_modules_are_returned_as_they_are():
    module = nn.Linear(2, 2)
    assert deferred_init(module) is module


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="constructed already"):
        deferred_init(nn.Linear(2, 2), 3)
    with pytest.raises(TypeError, match="module class"):
        deferred_init(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"return a torch.nn.Module, got 3"):
        deferred_init(lambda: 3)  # pyright: ignore[reportArgumentType]


def test_deferring_inside_a_deferred_constructor_works():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.inner = deferred_init(nn.Linear, 3, 3)
            self.last = nn.Linear(3, 3)

    torch.manual_seed(2)
    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    end = torch.get_rng_state()
    torch.manual_seed(2)
    module = materialize(deferred_init(Outer))
    assert torch.equal(torch.get_rng_state(), end)
    assert all(map(torch.equal, module.parameters(), expected.parameters()))


def test_legacy_constructors_are_recorded(same_as_ordinary: Check):
    same_as_ordinary(
        lambda: holder(a=torch.Tensor(3, 4).uniform_(), b=torch.FloatTensor(5).normal_())
    )


def test_operators_on_lists_of_tensors_are_recorded(same_as_ordinary: Check):
    def factory() -> Any:
        a, b = torch.rand(3), torch.rand(4)
        torch.ops.aten._foreach_mul_.Scalar([a, b], 2.0)
        return holder(a=a, b=b, c=torch.ops.aten._foreach_add.Scalar([a, b], 1.0)[1])

    same_as_ordinary(factory)


def test_attributes_that_hold_each_other_are_searched_once():
    def factory() -> Any:
        module: Any = nn.Linear(2, 2)
        module.cycle = [module.weight]
        module.cycle.append(module.cycle)
        return module

    module = materialize(deferred_init(factory))
    assert module.cycle[0] is module.weight


class Backbone(nn.Module):
    """Has values from an array, as those of a file are, and others of its own."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.pretrained = nn.Parameter(torch.from_numpy(np.ones((rows, 1024), np.float32)))
        self.head = nn.Linear(1024, 2)


def test_values_from_elsewhere_that_take_memory_are_named() -> None:
    with pytest.warns(DeferredWarning, match=r"1 tensors.*1228800 bytes.*'pretrained'.*skip_init"):
        model = deferred_init(Backbone, 300)
    assert is_deferred(model.head.weight)
    assert not is_deferred(model.pretrained)


def test_small_constants_are_real_without_a_warning() -> None:
    assert not is_deferred(deferred_init(Backbone, 3).pretrained)

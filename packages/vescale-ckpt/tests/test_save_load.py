from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vescale_ckpt
from vescale_ckpt import CheckpointError, MismatchError


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    loss = torch.tensor(0.0)
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss


def _net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)
    )


def test_a_model_and_its_optimizer_continue_bit_for_bit(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    _train(model, optimizer, 3)
    scheduler.step()
    vescale_ckpt.save(
        tmp_path / "ckpt",
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3},
    )
    other = _net()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    other_scheduler = torch.optim.lr_scheduler.MultiStepLR(other_optimizer, [7])
    loaded = vescale_ckpt.load(
        tmp_path / "ckpt",
        {"model": other, "optimizer": other_optimizer, "scheduler": other_scheduler, "step": 0},
    )
    assert loaded["step"] == 3
    assert loaded["model"] is other
    assert other_scheduler.state_dict() == scheduler.state_dict()
    assert torch.equal(_train(model, optimizer, 2), _train(other, other_optimizer, 2))
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_the_model_file_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    model = _net()
    vescale_ckpt.save(tmp_path / "ckpt", {"model": model})
    loaded = load_file(tmp_path / "ckpt" / "model.safetensors")
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


VALUES: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 2**70,
    "float": 0.1,
    "floats": [math.inf, -math.inf, -0.0, 5e-324],
    "tuple": (1, (2.5, "x"), []),
    "dict": {1: "a", -2: {"b": ()}, "c": {}},
    "dollar": {"$tensor": "no", "$x": {"$tuple": [1]}},
    "dollars": ["$", "$x", {"a": "$dollars.2.a", "$": "$"}],
    "counter": Counter({3: 2}),
    "text": "\u00fc\U0001f600\n",
}


def test_python_values_come_back_with_their_types(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"values": VALUES, "nan": math.nan})
    loaded = vescale_ckpt.load(tmp_path / "ckpt", {"values": None, "nan": None})
    assert repr(loaded["values"]) == repr(VALUES)
    assert math.isnan(loaded["nan"])


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 4, 5)], ids=str)
def test_every_dtype_and_shape_comes_back_to_the_bit(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    state = {str(dtype): _random(shape, dtype) for dtype in DTYPES}
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    vescale_ckpt.save(tmp_path / "ckpt", state)
    vescale_ckpt.load(tmp_path / "ckpt", target)
    for key, tensor in state.items():
        assert torch.equal(_bits(target[key]), _bits(tensor)), key


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(high, (nbytes,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.reshape(-1).to(torch.uint8)
    )


def test_views_of_any_stride_are_saved_and_filled(tmp_path: Path) -> None:
    base = torch.randn(6, 10, 4)
    state = {
        "t": base.permute(2, 0, 1),
        "s": base[::2, 1:7:3],
        "e": torch.randn(3, 1).expand(3, 5),
    }
    vescale_ckpt.save(tmp_path / "ckpt", state)
    target = {
        "t": torch.zeros(6, 10, 4).permute(2, 0, 1),
        "s": torch.zeros(6, 10, 4)[::2, 1:7:3],
        "e": torch.zeros(3, 5),
    }
    vescale_ckpt.load(tmp_path / "ckpt", target)
    assert all(torch.equal(target[key], state[key]) for key in state)


class _Pair(torch.nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.b = torch.nn.Linear(4, 4)
        if tied:
            self.b.weight = self.a.weight


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = _Pair(tied=True)
    vescale_ckpt.save(tmp_path / "ckpt", {"model": model})
    assert "b.weight" not in load_file(tmp_path / "ckpt" / "model.safetensors")
    for other in [_Pair(tied=True), _Pair(tied=False)]:
        vescale_ckpt.load(tmp_path / "ckpt", {"model": other})
        assert torch.equal(other.a.weight, model.a.weight)
        assert torch.equal(other.b.weight, model.a.weight)


def test_two_stored_tensors_are_not_read_into_tied_weights(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"model": _Pair(tied=False)})
    with pytest.raises(CheckpointError, match=r"'model.a.weight' and 'model.b.weight' share"):
        vescale_ckpt.load(tmp_path / "ckpt", {"model": _Pair(tied=True)})


def test_a_type_that_would_need_pickle_is_refused_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'a\.b\.1'.*object"):
        vescale_ckpt.save(tmp_path / "ckpt", {"a": {"b": [1, object()]}})
    assert list(tmp_path.iterdir()) == []


def test_missing_and_unexpected_keys_and_shapes_are_reported_together(tmp_path: Path) -> None:
    vescale_ckpt.save(
        tmp_path / "c", {"m": {"a": torch.ones(2), "b": torch.ones(3)}, "x": torch.ones(1)}
    )
    target: dict[str, Any] = {"m": {"a": torch.zeros(3), "c": torch.zeros(2)}, "y": 1}
    with pytest.raises(MismatchError) as caught:
        vescale_ckpt.load(tmp_path / "c", target)
    for text in [
        "m.a",
        "shape (2,)",
        "missing in the checkpoint: m.c",
        "unexpected in the checkpoint: m.b",
        "missing in the checkpoint: y",
        "unexpected in the checkpoint: x",
    ]:
        assert text in str(caught.value)
    assert torch.equal(target["m"]["a"], torch.zeros(3))


def test_keys_that_both_have_are_loaded_when_not_strict(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "c", {"m": {"a": torch.ones(2), "b": torch.ones(3)}, "x": 1})
    target: dict[str, Any] = {"m": {"a": torch.zeros(2), "c": torch.zeros(2)}, "y": 5}
    with pytest.warns(UserWarning, match="not loaded") as caught:
        loaded = vescale_ckpt.load(tmp_path / "c", target, strict=False)
    assert torch.equal(target["m"]["a"], torch.ones(2))
    assert loaded["y"] == 5
    assert str(caught[0].message).splitlines() == [
        "missing in the checkpoint, left as it is: m.c",
        "missing in the checkpoint, left as it is: y",
        "only in the checkpoint, not loaded: m.b",
        "only in the checkpoint, not loaded: x",
    ]


def test_a_strict_load_names_every_value_that_only_one_side_has(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "step": 3, "lr": [0.1, {"a": 1}], "o": {"m": 1}}
    vescale_ckpt.save(tmp_path / "ckpt", state)
    for key in ("step", "lr", "o"):
        given = {name: value for name, value in state.items() if name != key}
        with pytest.raises(MismatchError, match=f"unexpected in the checkpoint: {key}\n.*only="):
            vescale_ckpt.load(tmp_path / "ckpt", given)
    with pytest.raises(MismatchError, match="missing in the checkpoint: epoch"):
        vescale_ckpt.load(tmp_path / "ckpt", {**state, "epoch": 0})


def test_parts_of_a_checkpoint_can_be_left_out(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}, "step": 3}
    vescale_ckpt.save(tmp_path / "ckpt", state)
    target = {"model": {"w": torch.zeros(2)}}
    only = ["model"]
    assert vescale_ckpt.load(tmp_path / "ckpt", target, only=only).keys() == {"model"}
    assert torch.equal(target["model"]["w"], torch.ones(2))
    with pytest.raises(MismatchError, match="missing in the checkpoint: scheduler"):
        vescale_ckpt.load(tmp_path / "ckpt", {"scheduler": None})


def test_backward_of_what_was_computed_before_a_load_is_refused(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    vescale_ckpt.save(tmp_path / "ckpt", {"weight": torch.full((3,), 5.0)})
    loss = (weight * weight).sum()
    vescale_ckpt.load(tmp_path / "ckpt", {"weight": weight})
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        loss.backward()


def test_a_lazy_module_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'model\.\w+' of a lazy module has no shape yet"):
        vescale_ckpt.save(tmp_path / "ckpt", {"model": torch.nn.LazyLinear(3)})
    vescale_ckpt.save(tmp_path / "ckpt", {"model": torch.nn.Linear(2, 3)})
    with pytest.raises(MismatchError, match=r"'model\.weight' of a lazy module has no shape yet"):
        vescale_ckpt.load(tmp_path / "ckpt", {"model": torch.nn.LazyLinear(3)})


class _Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("wrap", "prefix"), [(torch.compile, "_orig_mod"), (lambda _: _Wrapped(), "module")]
)
def test_names_that_differ_by_a_wrapper_are_said_to(
    tmp_path: Path, wrap: Callable[[torch.nn.Module], Any], prefix: str
) -> None:
    pair = torch.nn.Linear(2, 2), wrap(torch.nn.Linear(2, 2))
    for saved, given in (pair, pair[::-1]):
        vescale_ckpt.save(tmp_path / "ckpt", {"model": saved})
        with pytest.raises(MismatchError, match=rf"only '{prefix}\.'.*differs.*model\.{prefix}"):
            vescale_ckpt.load(tmp_path / "ckpt", {"model": given})


def test_a_default_device_is_for_the_tensors_of_the_program(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer, 1)
    rows = torch.arange(12.0)
    state = {"model": model, "optimizer": optimizer, "rng": vescale_ckpt.RngState()}
    views = {"a": rows[:8], "b": rows[4:], "c": rows[:2].expand(3, 2)}
    with torch.device("meta"), vescale_ckpt.AsyncSaver() as saver:
        vescale_ckpt.save(tmp_path / "ckpt", {**state, "views": views})
        saver.save(tmp_path / "async", {**state, "views": views})
    expected = _train(model, optimizer, 1)
    other = _net()
    fresh = torch.optim.AdamW(other.parameters())
    filled = torch.zeros(12)
    given = {"model": other, "optimizer": fresh, "rng": vescale_ckpt.RngState()}
    views = {"a": filled[:8], "b": filled[4:], "c": filled[:2].expand(3, 2)}
    for name in ("ckpt", "async"):
        with torch.device("meta"):
            vescale_ckpt.load(tmp_path / name, {**given, "views": views})
        assert torch.equal(filled, rows)
        filled.zero_()
        assert _train(other, fresh, 1) == expected


def test_a_frozen_parameter_of_a_class_of_its_own_is_stored(tmp_path: Path) -> None:
    class Named(torch.nn.Parameter):
        pass

    weight = Named(torch.arange(3.0), requires_grad=False)
    vescale_ckpt.save(tmp_path / "ckpt", {"w": weight})
    given = Named(torch.zeros(3), requires_grad=False)
    vescale_ckpt.load(tmp_path / "ckpt", {"w": given})
    assert torch.equal(given, weight)

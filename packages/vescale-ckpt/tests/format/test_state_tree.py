"""Whatever people put into a state comes back as it was, or is refused with its key."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import fractions
import math
import types
import uuid
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import vescale_ckpt
from vescale_ckpt import CheckpointError, PerRank


class Pair(NamedTuple):
    a: int
    b: int


class Colour(enum.IntEnum):
    RED = 1


class Name(enum.StrEnum):
    X = "x"


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class MyDict(dict[str, Any]):
    pass


class MyList(list[Any]):
    pass


class MyInt(int):
    pass


class MyFloat(float):
    pass


class MyStr(str):
    pass


KEPT: dict[str, Any] = {
    "size": torch.Size([2, 3]),
    "empty size": torch.Size([]),
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict([("x", (1,))]))]),
    "ordered with ints": OrderedDict([(2, "b"), (1, "a")]),
    "ordered with tags": OrderedDict([("$tuple", 1)]),
    "empty ordered": OrderedDict[str, Any](),
    "default": defaultdict(list, {"a": [1]}),
    "default of nothing": defaultdict(None, {"a": 1}),
    "default of dicts": defaultdict(dict, {3: {"a": 1}}),
    "counter": Counter({"a": 2}),
    "nested": {"a": [(torch.Size([1]), OrderedDict([("k", defaultdict(int, {"z": 1}))]))]},
    "order": {"b": 1, "a": 2, "c": {"z": 1, "y": 2}},
    "int keys": {1: "a", "1": "b", -5: "c"},
    "huge": 10**4200,
    "negative": -(2**100),
    "floats": [0.1, 5e-324, 1.7976931348623157e308, -0.0, math.inf, -math.inf],
    "odd keys": {
        "a.b": 1,
        "a": {"c": 2},
        "x/y": 3,
        "n\nl": 4,
        "": 5,
        "\u00fc": 6,
        "q\"'\\": 7,
        "\0": 8,
    },
    "texts": ["", "$", "$x", "\n\0\u2028\U0001f600", "\ud800", "a" * 100_000],
    "bools": [True, False, 1, 0, None],
    "deep": [[[[[[[[[[(({"a": []},),)]]]]]]]]]],
}


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        factory = getattr(a, "default_factory", 0) is getattr(b, "default_factory", 0)
        keys = [(type(key), key) for key in a] == [(type(key), key) for key in b]
        return factory and keys and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("wrap", ["plain", "beside a tensor", "per rank"])
def test_a_value_comes_back_as_what_it_was(tmp_path: Path, name: str, wrap: str) -> None:
    value = KEPT[name]
    if wrap == "per rank":
        vescale_ckpt.save(tmp_path / "ckpt", {"v": PerRank(value)})
        loaded = vescale_ckpt.load(tmp_path / "ckpt", {"v": PerRank(None)})["v"].value
    elif wrap == "plain":
        vescale_ckpt.save(tmp_path / "ckpt", {"v": value})
        loaded = vescale_ckpt.load(tmp_path / "ckpt", {"v": None})["v"]
    else:
        vescale_ckpt.save(tmp_path / "ckpt", {"v": {"t": torch.ones(2), "v": value}})
        given = {"v": {"t": torch.zeros(2), "v": None}}
        loaded = vescale_ckpt.load(tmp_path / "ckpt", given)["v"]["v"]
    assert same(loaded, value), (loaded, value)


@pytest.mark.parametrize("kind", [dict, OrderedDict, defaultdict])
def test_a_dict_with_tensors_stays_the_kind_that_was_given(tmp_path: Path, kind: Any) -> None:
    def state(fill: float) -> Any:
        items = {"w": torch.full((2,), fill), "n": fill}
        return defaultdict(list, items) if kind is defaultdict else kind(items)

    vescale_ckpt.save(tmp_path / "ckpt", {"v": state(3.0)})
    loaded = vescale_ckpt.load(tmp_path / "ckpt", {"v": state(0.0)})["v"]
    assert type(loaded) is kind
    assert loaded["w"].tolist() == [3, 3]
    assert loaded["n"] == 3


REFUSED: dict[str, Any] = {
    "namedtuple": Pair(1, 2),
    "deque": deque([1]),
    "set": {1},
    "frozenset": frozenset({1}),
    "dataclass": Config(),
    "dataclass type": Config,
    "complex": 1j,
    "bytes": b"x",
    "bytearray": bytearray(b"x"),
    "numpy scalar": np.float64(1.5),
    "numpy int": np.int64(1),
    "numpy bool": np.bool_(True),
    "numpy array": np.zeros(3),
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "datetime": datetime.datetime(2020, 1, 1),
    "timedelta": datetime.timedelta(1),
    "path": Path("x"),
    "uuid": uuid.UUID(int=1),
    "decimal": Decimal("0.1"),
    "fraction": fractions.Fraction(1, 3),
    "int enum": Colour.RED,
    "str enum": Name.X,
    "dict subclass": MyDict(a=1),
    "list subclass": MyList([1]),
    "int subclass": MyInt(1),
    "float subclass": MyFloat(1),
    "str subclass": MyStr("x"),
    "user dict": UserDict({"a": 1}),
    "chain map": ChainMap({"a": 1}),
    "read-only dict": types.MappingProxyType({"a": 1}),
    "simple namespace": types.SimpleNamespace(a=1),
    "range": range(3),
    "slice": slice(3),
    "ellipsis": ...,
    "function": len,
    "class with a state": torch.nn.Linear,
    "generator": torch.Generator(),
    "default of a lambda": defaultdict(lambda: 5, {"a": 1}),
    "bool keys": {True: 1},
    "float keys": {0.5: 1},
    "none keys": {None: 1},
    "tuple keys": {(1, 2): 1},
    "enum keys": {Name.X: 1},
    "tensor keys": {torch.ones(1): 1},
    "huge": 10**5000,
    "meta": torch.ones(2, device="meta"),
    "complex128": torch.ones(2, dtype=torch.complex128),
    "subclass": torch.ones(2).as_subclass(type("Odd", (torch.Tensor,), {})),
    "key that is no text": {"a": {"\ud800": torch.ones(1)}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_would_come_back_as_another_is_refused_with_its_key(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(CheckpointError, match=r"'?v\.1(\.|'|\b)"):
        vescale_ckpt.save(tmp_path / "ckpt", {"v": [0, REFUSED[name]]})
    assert list(tmp_path.iterdir()) == []


ODD_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.ones(2).to_sparse(),
    "complex32": lambda: torch.ones(2, dtype=torch.complex32),
    "csr": lambda: torch.ones(2, 2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "packed": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD_TENSORS)
def test_a_tensor_without_plain_bytes_is_refused_with_its_key(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"'v\.1'"):
        vescale_ckpt.save(tmp_path / "ckpt", {"v": [0, ODD_TENSORS[name]()]})
    assert list(tmp_path.iterdir()) == []


TENSORS: dict[str, Any] = {
    "scalar": torch.tensor(5.0),
    "no elements": torch.empty(3, 0, 2),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 4),
    "strided": torch.arange(20.0)[1::3],
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative bit": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "graph": torch.randn(3, requires_grad=True) * 2,
    "view of a leaf": torch.nn.Parameter(torch.randn(4))[1:],
    "read-only": torch.from_numpy(np.arange(3.0)),
    "shared memory": torch.arange(3.0).share_memory_(),
    "odd offset": torch.arange(20, dtype=torch.uint8)[3:],
    "nan": torch.tensor([math.nan, -math.nan, math.inf]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_any_kind_comes_back_to_the_bit(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]
    vescale_ckpt.save(tmp_path / "ckpt", {"v": [{"w": tensor}]})
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    given = [
        torch.zeros_like(plain),
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype),
    ]
    for target in given:
        vescale_ckpt.load(tmp_path / "ckpt", {"v": [{"w": target}]})
        bits = target.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(bits, plain.view(-1).view(torch.uint8))
        assert target.shape == tensor.shape


def test_a_conjugate_view_is_filled_with_the_values_that_were_saved(tmp_path: Path) -> None:
    saved = torch.tensor([1 + 2j, 3 - 4j])
    vescale_ckpt.save(tmp_path / "ckpt", {"w": saved, "v": saved.imag.clone()})
    memory = torch.zeros(2, dtype=torch.complex64)
    other = torch.zeros(2, dtype=torch.complex64)
    vescale_ckpt.load(tmp_path / "ckpt", {"w": memory.conj(), "v": other.conj().imag})
    assert torch.equal(memory.conj(), saved)
    assert torch.equal(other.conj().imag, saved.imag)


def test_the_same_state_saved_twice_is_the_same_bytes(tmp_path: Path) -> None:
    state = {"m": {"w": torch.arange(5.0)}, "v": KEPT["nested"]}
    for name in ("a", "b"):
        vescale_ckpt.save(tmp_path / name, state)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_tree_that_contains_itself_is_refused(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="'v': it contains itself"):
        vescale_ckpt.save(tmp_path / "ckpt", {"v": value})


@pytest.mark.parametrize(
    ("tensor", "way_out"),
    [
        (torch.ones(2, dtype=torch.complex128), "view_as_real"),
        (torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), r"view\(torch.uint8\)"),
    ],
    ids=["complex128", "packed"],
)
def test_a_dtype_that_files_lack_is_refused_with_what_to_store_instead(
    tmp_path: Path, tensor: torch.Tensor, way_out: str
) -> None:
    with pytest.raises(CheckpointError, match=f"cannot hold; store .*{way_out}"):
        vescale_ckpt.save(tmp_path / "ckpt", {"w": tensor})

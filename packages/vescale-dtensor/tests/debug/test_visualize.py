"""Maps of which rank holds what."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard, RaggedShard, emulate, layout_text, visualize
from vescale_dtensor._debug.visualize import _blocks, _holders, ranks_text
from vescale_dtensor._layout.boxes import local_boxes


def _text(shape: Sequence[int], mesh_shape: Sequence[int], *placements: Placement) -> list[str]:
    """The map without its title."""
    return layout_text(shape, mesh_shape, placements).splitlines()[1:]


def test_a_matrix_is_a_grid_of_blocks_with_their_ranks() -> None:
    assert _text((8, 6), (2, 2), Shard(0), Shard(1)) == [
        "      0:3   3:6",
        "    +-----+-----+",
        "0:4 | 0   | 1   |",
        "    +-----+-----+",
        "4:8 | 2   | 3   |",
        "    +-----+-----+",
    ]


def test_a_replicated_block_names_all_its_ranks() -> None:
    assert _text((8, 6), (2, 2), Replicate(), Shard(1)) == [
        "      0:3   3:6",
        "    +-----+-----+",
        "0:8 | 0,2 | 1,3 |",
        "    +-----+-----+",
    ]
    assert _text((3,), (2, 3), Replicate(), Replicate())[2] == "| 0-5 |"


def test_a_vector_is_one_row() -> None:
    assert _text((10,), (4,), Shard(0)) == [
        "  0:3   3:6   6:9   9:10",
        "+-----+-----+-----+------+",
        "| 0   | 1   | 2   | 3    |",
        "+-----+-----+-----+------+",
    ]


def test_interleaved_and_ragged_parts_are_where_they_are() -> None:
    interleaved = _text((12,), (2,), InterleavedShard(0, 3))[2]
    assert interleaved.replace(" ", "") == "|0|1|0|1|0|1|"
    assert _text((10,), (3,), RaggedShard((0,), 2, (1, 0, 4))) == [
        "  0:2   2:10",
        "+-----+------+",
        "| 0   | 2    |",
        "+-----+------+",
        "1: nothing",
    ]


def test_what_is_partial_is_said() -> None:
    text = layout_text((4,), (2, 2), (Shard(0), Partial("avg")), axis_names=("dp", "tp"))
    assert text.splitlines()[:2] == [
        "shape (4,) on mesh (dp=2, tp=2): Shard(dim=0), Partial(avg)",
        "Partial over tp: the value is the avg of what the ranks along it hold",
    ]
    assert "Partial over mesh axis 0: the value is the sum" in layout_text(
        (4,), (2,), (Partial(),)
    )


def test_more_dims_are_a_list_of_boxes() -> None:
    assert _text((4, 4, 6), (2, 2), Shard(0), Shard(2)) == [
        "0: [0:2, 0:4, 0:3]",
        "1: [0:2, 0:4, 3:6]",
        "2: [2:4, 0:4, 0:3]",
        "3: [2:4, 0:4, 3:6]",
    ]
    assert _text((2, 3, 4), (4,), Shard(0))[-1] == "2,3: nothing"
    assert _text((8, 1, 1), (1,), InterleavedShard(0, 8))[0].endswith("+ 5 more")


def test_scalars_and_tensors_without_elements_have_a_map() -> None:
    assert _text((), (4,), Replicate()) == ["0-3: the scalar"]
    assert _text((), (2,), RaggedShard((0,), 1, (0, 1))) == ["0: nothing", "1: the scalar"]
    assert _text((0, 3), (2,), Shard(0)) == ["no elements", "0,1: nothing"]


def test_the_middle_of_a_large_mesh_is_left_out() -> None:
    text = _text((4096, 4096), (64, 64), Shard(0), Shard(1))
    assert max(map(len, text)) <= 99
    assert len(text) < 40
    assert [line for line in text if line.startswith("...")]
    assert text[2].startswith("0:64      | 0    | 1      | 2 ")
    assert text[-2].endswith("| 4095      |")
    assert len(_text((4096, 2, 2), (4096,), Shard(0))) == 17


def test_many_ranks_of_one_block_are_shortened() -> None:
    assert ranks_text([]) == "-"
    assert ranks_text([0, 1, 2, 3, 8]) == "0-3,8"
    assert ranks_text(range(0, 64, 8)) == "0,8,..,56 (8 ranks)"
    assert max(map(len, _text((1024,), (8, 32), Replicate(), Shard(0)))) <= 99


def test_ranks_are_those_of_the_mesh() -> None:
    text = layout_text((2,), (2,), (Shard(0),), ranks=(7, 3))
    assert text.splitlines()[3] == "| 7   | 3   |"


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    """A shape of one or two dims, a mesh shape and placements that fit them."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    choices: list[Placement] = [Replicate(), Partial(), *(Shard(dim) for dim in range(len(shape)))]
    return shape, mesh_shape, tuple(draw(st.sampled_from(choices)) for _ in mesh_shape)


@given(layouts())
@settings(max_examples=100)
def test_every_element_is_in_the_block_of_the_ranks_that_hold_it(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh_shape, placements = layout
    coordinates = list(product(*map(range, mesh_shape)))
    held = torch.zeros(len(coordinates), *shape, dtype=torch.bool)
    for rank, coordinate in enumerate(coordinates):
        for each in local_boxes(shape, mesh_shape, coordinate, placements):
            held[(rank, *each.box.slices)] = True
    held = held.view(len(coordinates), -1, shape[-1])
    blocks = _blocks(shape, _holders(shape, mesh_shape, placements, range(len(coordinates))))
    rows, columns = blocks.edges
    for (row, column), ranks in blocks.ranks.items():
        block = held[:, rows[row] : rows[row + 1], columns[column] : columns[column + 1]]
        expected = torch.zeros_like(block)
        expected[ranks] = True
        assert torch.equal(block, expected)
    assert len(blocks.ranks) == (len(rows) - 1) * (len(columns) - 1)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_a_tensor_is_shown_and_drawn(tmp_path: Path) -> None:
    with emulate(4):
        for shape in ((4,), (4, 6)):
            x = DTensor.from_local(torch.ones(shape), _mesh(), (Replicate(), Shard(0)))
            text = visualize(x, path=tmp_path / "map.png")
            assert text == layout_text(x.shape, (2, 2), x.placements, axis_names=("dp", "tp"))
            assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulate(4):
        x = DTensor.from_local(torch.ones(2, 2, 2), _mesh(), (Replicate(), Replicate()))
        with pytest.raises(ValueError, match=r"one or two dims with elements, got .*\(2, 2, 2\)"):
            visualize(x, path=tmp_path / "map.png")
        with pytest.raises(ValueError, match=r"ends in \.png, got 'map\.svg'"):
            visualize(x, path="map.svg")
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        x = DTensor.from_local(torch.ones(2), _mesh(), (Replicate(), Replicate()))
        with pytest.raises(ImportError, match=r"vescale-dtensor\[visualize\]"):
            visualize(x, path=tmp_path / "map.png")
    assert not list(tmp_path.iterdir())


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="one placement"):
        layout_text((4,), (2, 2), (Shard(0),))
    with pytest.raises(ValueError, match="expected 2 ranks"):
        layout_text((4,), (2,), (Shard(0),), ranks=(0, 1, 2))

"""Ranks that need the same bytes read them once, through the page cache or from one another."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError
from vescale_ckpt._comm import hosts
from vescale_ckpt._format.blocks import BlockIndex
from vescale_ckpt._format.byte_ranges import ByteRanges
from vescale_ckpt._format.manifest import Manifest, StoredFile
from vescale_ckpt._load import load as load_module, two_phase_read
from vescale_ckpt._load.tiling import MIN_PART_NBYTES, full_tiling, tiling
from vescale_ckpt._load.two_phase_read import divide
from vescale_dtensor import InterleavedShard, distribute_tensor
from vescale_testing import World

Layout = tuple[tuple[int, ...], tuple[Placement, ...]]

ROWS: Layout = (-1,), (Shard(0),)
COLUMNS: Layout = (-1,), (Shard(1),)
COPIES: Layout = (-1,), (Replicate(),)
TP_FSDP: Layout = (2, 2), (Shard(1), Shard(0))
FUSED: Layout = (-1,), (InterleavedShard(1, 2),)


def full_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"wide": (600, 2000), "tall": (4000, 320), "small": (8, 8), "deep": (40, 40, 200)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def distributed(layout: Layout) -> dict[str, DTensor]:
    mesh_shape, placements = layout
    if mesh_shape == (-1,):
        mesh_shape = (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", mesh_shape)
    return {key: distribute_tensor(full, mesh, placements) for key, full in full_tensors().items()}


def save_under(path: str, layout: Layout) -> None:
    vescale_ckpt.save(path, {"model": distributed(layout)})


def zeros_like(state: dict[str, DTensor]) -> dict[str, Any]:
    return {key: torch.zeros_like(tensor) for key, tensor in state.items()}


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    """Count the bytes that are read from files from now on."""
    total = [0]
    original = os.preadv

    def preadv(*args: Any) -> int:
        count = original(*args)
        total[0] += count
        return count

    patch.setattr(os, "preadv", preadv)
    return total


def load_under(path: str, layout: Layout, exchange: bool | None) -> tuple[int, list[str]]:
    """Load and return how many bytes were read, and what is wrong then."""
    expected = distributed(layout)
    target = zeros_like(expected)
    with pytest.MonkeyPatch.context() as patch:
        total = counted(patch)
        vescale_ckpt.load(path, {"model": target}, exchange=exchange)
    wrong = [
        key
        for key, tensor in target.items()
        if not torch.equal(tensor.to_local(), expected[key].to_local())
    ]
    return total[0], wrong


@pytest.mark.parametrize(
    ("size", "saved", "loaded"),
    [
        (2, ROWS, COLUMNS),
        (4, TP_FSDP, ROWS),
        (2, COPIES, COPIES),
        (4, COLUMNS, TP_FSDP),
        (4, ROWS, ROWS),
        (4, ROWS, FUSED),
    ],
    ids=["rows columns", "tp x fsdp rows", "copies", "columns tp x fsdp", "rows", "fused"],
)
def test_all_ranks_together_read_the_state_once(
    world2: World, world4: World, tmp_path: Path, size: int, saved: Layout, loaded: Layout
) -> None:
    path = str(tmp_path / "ckpt")
    {2: world2, 4: world4}[size].run(save_under, path, saved)
    answers = world4.run(load_under, path, loaded, True)
    assert [wrong for _, wrong in answers] == [[]] * 4
    assert sum(nbytes for nbytes, _ in answers) <= 1.05 * state_nbytes()
    # On one host they ask the page cache for what they need.
    answers = world4.run(load_under, path, loaded, None)
    assert [wrong for _, wrong in answers] == [[]] * 4
    assert sum(nbytes for nbytes, _ in answers) <= 4.05 * state_nbytes()


def state_nbytes() -> int:
    return sum(tensor.nbytes for tensor in full_tensors().values())


def bytes_sent(path: str, layout: Layout, exchange: bool | None) -> int:
    """Load and return how many bytes this rank has sent to others."""
    sent = [0]
    original = dist.all_to_all_single

    def measuring(
        received: torch.Tensor, outgoing: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        sent[0] += outgoing.nbytes
        return original(received, outgoing, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", measuring)
        load_under(path, layout, exchange)
    return sent[0]


def test_ranks_that_load_what_they_have_saved_send_next_to_nothing(
    world4: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "ckpt")
    world4.run(save_under, path, ROWS)
    # The blocks with the header and the small tensor are read by one rank.
    assert sum(world4.run(bytes_sent, path, ROWS, True)) < state_nbytes() / 8
    assert sum(world4.run(bytes_sent, path, COLUMNS, True)) > state_nbytes() / 2


def test_ranks_of_one_host_send_nothing(world4: World, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    world4.run(save_under, path, ROWS)
    assert sum(world4.run(bytes_sent, path, COLUMNS, None)) == 0


def load_as_if_apart(path: str) -> tuple[int, int]:
    """Load on ranks that take each other for other hosts; return bytes sent and read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "this_host", lambda: f"host {dist.get_rank() // 2}")
        patch.setattr(hosts, "this_host", lambda: f"host {dist.get_rank() // 2}")
        total = counted(patch)
        return bytes_sent(path, COPIES, None), total[0]


def test_ranks_of_several_hosts_exchange_what_they_read(world4: World, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    world4.run(save_under, path, ROWS)
    sent, read = zip(*world4.run(load_as_if_apart, path), strict=True)
    assert sum(sent) > 2.9 * state_nbytes()
    assert sum(read) <= 1.05 * state_nbytes()


def longest_exchange(path: str, layout: Layout, limit: int) -> tuple[int, int, list[str]]:
    """Load in small rounds; return their number, the most bytes in one, and what is wrong."""
    sizes: list[int] = []
    original = dist.all_to_all_single

    def measuring(received: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(max(received.numel(), sent.numel()))
        return original(received, sent, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_phase_read, "_ROUND_NBYTES", limit)
        patch.setattr(dist, "all_to_all_single", measuring)
        _, wrong = load_under(path, layout, exchange=True)
    return len(sizes), max(sizes), wrong


@pytest.mark.parametrize("layout", [COPIES, COLUMNS, TP_FSDP], ids=["copies", "columns", "both"])
def test_a_round_is_no_longer_than_it_may_be(
    world4: World, tmp_path: Path, layout: Layout
) -> None:
    path = str(tmp_path / "ckpt")
    world4.run(save_under, path, ROWS)
    for number, most, wrong in world4.run(longest_exchange, path, layout, 1 << 18):
        assert wrong == []
        assert most <= 1 << 18
        assert number > 8


def message_of_load(path: str, layout: Layout, exchange: bool) -> str:
    with pytest.raises(CorruptCheckpointError) as caught:
        vescale_ckpt.load(path, {"model": zeros_like(distributed(layout))}, exchange=exchange)
    return str(caught.value)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "page cache"])
@pytest.mark.parametrize("layout", [COPIES, COLUMNS, ROWS], ids=["copies", "columns", "rows"])
def test_damage_that_one_rank_finds_is_named_on_all(
    world4: World, tmp_path: Path, layout: Layout, exchange: bool
) -> None:
    path = tmp_path / "ckpt"
    world4.run(save_under, str(path), ROWS)
    with open(path / "model.safetensors", "r+b") as stream:
        stream.seek(4096 + 2_000_000)
        byte = stream.read(1)[0]
        stream.seek(4096 + 2_000_000)
        stream.write(bytes([byte ^ 1]))
    messages = world4.run(message_of_load, str(path), layout, exchange)
    assert len(set(messages)) == 1
    assert "model.safetensors" in messages[0]
    assert "'model.tall'" in messages[0]


def message_when_reading_fails(path: str, exchange: bool) -> str:
    state = zeros_like(distributed(COPIES))

    def fail(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError) as caught:
            vescale_ckpt.load(path, {"model": state}, exchange=exchange)
    return str(caught.value)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "page cache"])
def test_a_rank_that_cannot_read_does_not_hang_the_others(
    world4: World, tmp_path: Path, exchange: bool
) -> None:
    world4.run(save_under, str(tmp_path / "ckpt"), ROWS)
    messages = world4.run(message_when_reading_fails, str(tmp_path / "ckpt"), exchange)
    assert len(set(messages)) == 1
    assert "Input/output error (on rank 1)" in messages[0]


@given(
    loads=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30),
    limit=st.integers(1, 20),
    most=st.integers(1, 5),
)
def test_turns_are_put_together_as_far_as_the_limits_allow(
    loads: list[tuple[int, int]], limit: int, most: int
) -> None:
    rounds = divide(np.array(loads).T, limit, most)
    assert [turn for first, last in rounds for turn in range(first, last)] == [*range(len(loads))]
    for (first, last), (_, end) in zip(rounds, [*rounds[1:], (0, 0)], strict=True):
        sums = [sum(kind) for kind in zip(*loads[first:last], strict=True)]
        assert last - first == 1 or (last - first <= most and max(sums) <= limit)
        longer = [sum(kind) for kind in zip(*loads[first : last + 1], strict=True)]
        assert not end or last - first == most or max(longer) > limit


class FileStub(NamedTuple):
    file: str


class ReadItemStub(NamedTuple):
    stored: FileStub
    ranges: ByteRanges


BLOCK_NBYTES = 1 << 20


# A deadline would measure what else the machine does.
@given(data=st.data(), nbytes=st.integers(BLOCK_NBYTES, 3 * BLOCK_NBYTES))
def test_parts_cover_a_block_if_they_leave_no_gap_and_do_not_overlap(
    data: st.DataObject, nbytes: int
) -> None:
    files = {"f": StoredFile(nbytes=nbytes, checksums=())}
    manifest = Manifest(block_nbytes=BLOCK_NBYTES, files=files, tensors={}, aliases={}, tree={})
    block_index = BlockIndex(manifest)
    places = st.integers(0, nbytes)
    cuts = sorted({0, nbytes, *data.draw(st.lists(places, max_size=4))})
    parts = [*itertools.pairwise(cuts)]
    if data.draw(st.booleans()):
        parts.append(data.draw(st.tuples(places, places)))
    if data.draw(st.booleans()):
        parts.pop(data.draw(st.integers(0, len(parts) - 1)))
    total = np.zeros(block_index.count, np.int64)
    times = np.zeros(nbytes + 1, np.int64)
    for rank, (start, stop) in enumerate(parts):
        if start < stop:
            item: Any = ReadItemStub(FileStub("f"), ByteRanges(start, stop - start))
            total += tiling(block_index, [item], rank)
            times[start] += 1
            times[stop] -= 1
    once = np.cumsum(times)[:-1] == 1
    for block, is_covered in enumerate((total == full_tiling(block_index)).tolist()):
        lower, upper = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, nbytes)
        lengths = [min(b, upper) - max(a, lower) for a, b in parts]
        is_long = all(length <= 0 or length >= MIN_PART_NBYTES for length in lengths)
        assert is_covered == (bool(once[lower:upper].all()) and is_long)


def as_they_are(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def converted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t()


def load_torn(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    model = torch.nn.Module()
    buffer = change(torch.zeros(700, 1000))
    model.register_buffer("w", buffer)
    vescale_ckpt.load_safetensors(path, model)
    expected = torch.arange(700_000.0).reshape(700, 1000)
    return torch.equal(buffer, expected.to(buffer.dtype))


@pytest.mark.parametrize("change", [as_they_are, converted, transposed])
def test_elements_that_are_not_aligned_in_a_foreign_file_are_read(
    world2: World, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    content = torch.arange(700_000.0).numpy().tobytes()
    entry = {"dtype": "F32", "shape": [700, 1000], "data_offsets": [0, len(content)]}
    header = json.dumps({"w": entry}).encode()
    header += b" " * (3 - len(header) % 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)
    assert world2.run(load_torn, str(path), change) == [True, True]

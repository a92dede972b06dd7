"""The command line: ``vescale-ckpt inspect PATH`` and ``vescale-ckpt verify PATH``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ._commit import read_record
from ._record import Record
from ._tree import Json, elements_of, is_reference, items_of
from ._verify import verify
from .exceptions import CheckpointError

_MAX_VALUE_LENGTH = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="vescale-ckpt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="show what a checkpoint holds")
    check = commands.add_parser("verify", help="read every byte and compare checksums")
    for command in (inspect, check):
        command.add_argument("path", type=Path)
    check.add_argument("--threads", type=int, default=4, help="blocks read at the same time")
    options = parser.parse_args(arguments)
    if options.command == "inspect":
        return _inspect(options.path)
    return _verify(options.path, options.threads)


def _inspect(path: Path) -> int:
    try:
        record = read_record(path)
    except (OSError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 1
    for line in describe(record):
        print(line)
    return 0


def describe(record: Record) -> list[str]:
    """Return the lines that ``inspect`` prints."""
    lines = [f"{_amount(file.nbytes):>10}  {name}" for name, file in record.files.items()]
    total = sum(tensor.nbytes for tensor in record.tensors.values())
    lines += [f"{_amount(total):>10}  in {len(record.tensors)} tensors", ""]
    for key, node in record.tree.items():
        lines += _node_lines(record, key, node, 0)
    return lines


def _node_lines(record: Record, key: str | int, node: Json, depth: int) -> list[str]:
    indent = "  " * depth
    if is_reference(node):
        reference = node["$tensor"]
        stored = record.stored(reference)
        alias = record.aliases.get(reference)
        shape = "x".join(map(str, stored.shape)) or "scalar"
        same = f", the same as {alias}" if alias else ""
        return [f"{indent}{key}: {stored.dtype} {shape}, {_amount(stored.nbytes)}{same}"]
    children = items_of(node)
    if children is None and (elements := elements_of(node)) is not None:
        children = list(enumerate(elements))
    text = json.dumps(node)
    if not children or (len(text) <= _MAX_VALUE_LENGTH and "$tensor" not in text):
        return [f"{indent}{key} = {text[:_MAX_VALUE_LENGTH]}"]
    lines = [f"{indent}{key}"]
    for name, child in children:
        lines += _node_lines(record, name, child, depth + 1)
    return lines


def _amount(nbytes: int) -> str:
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.4g} {unit}"
        amount /= 1000
    return f"{amount:.4g} TB"


def _verify(path: Path, num_threads: int) -> int:
    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty() and (done % 64 == 0 or done == total):
            print(f"\r{done} of {total} blocks", end="", file=sys.stderr, flush=True)

    complaints = verify(path, num_threads=num_threads, progress=progress)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if not complaints:
        print(f"{path}: every byte is as it was saved")
    return 1 if complaints else 0

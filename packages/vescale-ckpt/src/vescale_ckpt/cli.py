"""Look at checkpoints, check, compare, copy and delete them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ._interop.convert import convert, open_source
from ._store.open import open_checkpoint, storage_at
from ._store.retention import remove_older
from ._store.verify import complaints_about
from ._tools.describe import amount, describe
from ._tools.diff import differences

_DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16, torch.bfloat16)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vescale-ckpt", description=__doc__)
    add_commands(parser)
    return parser


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add all subcommands to a parser; each sets ``run``, which returns an exit status."""
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    inspect = command("inspect", _inspect, "show what a checkpoint holds")
    inspect.add_argument("path", type=_place)

    check = command("verify", _verify, "read every byte and compare checksums")
    check.add_argument("path", type=_place)
    check.add_argument("--threads", type=int, default=4, help="blocks read at the same time")

    diff = command("diff", _diff, "show in what two checkpoints differ, of any formats")
    diff.add_argument("a", type=_place)
    diff.add_argument("b", type=_place)
    _add_key(diff)

    copy = command("convert", _convert, "write a checkpoint in another format, tensor by tensor")
    copy.add_argument("source", type=_place, help="ours, HuggingFace's or DCP's")
    copy.add_argument("target", type=_place)
    copy.add_argument("--to", choices=["vescale", "hf", "dcp"], required=True)
    copy.add_argument("--dtype", choices=sorted(_DTYPES), help="of floats, for hf only")
    _add_max_file(copy)
    _add_key(copy)

    reshard = command(
        "reshard",
        _convert,
        "copy a checkpoint into files of another length; to load it on another number of ranks, "
        "or under another plan, there is no need for that",
    )
    reshard.add_argument("source", type=_place)
    reshard.add_argument("target", type=_place)
    _add_max_file(reshard)
    reshard.set_defaults(to="vescale", key="model", dtype=None)

    gc = command("gc", _gc, "delete all but the last whole checkpoints of a directory or a URL")
    gc.add_argument("directory", type=_place)
    gc.add_argument("--keep", type=int, required=True, help="how many to keep")
    gc.add_argument("--prefix", help="what their names begin with, if not all begin alike")
    gc.add_argument("--thorough", action="store_true", help="read every byte of those to keep")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def _place(text: str) -> Path | str:
    """Return a path, or a URL as it is: a path has no double slashes."""
    return text if "://" in text else Path(text)


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key", default="model", help="the part that HuggingFace files hold")


def _add_max_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-file-nbytes", type=int, help="when to begin another file")


def _inspect(options: argparse.Namespace) -> int:
    for line in describe(storage_at(options.path).read_manifest()):
        print(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    try:
        complaints = complaints_about(
            partial(open_checkpoint, options.path),
            num_threads=options.threads,
            progress=_show("blocks"),
        )
    except OSError as error:
        complaints = [f"cannot read {options.path}: {error}"]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if not complaints:
        print(f"{options.path}: every byte is as it was saved")
    return 1 if complaints else 0


def _diff(options: argparse.Namespace) -> int:
    with open_source(options.a, options.key) as a, open_source(options.b, options.key) as b:
        found = list(differences(a, b, _show("bytes")))
    for line in found:
        print(line)
    return 1 if found else 0


def _convert(options: argparse.Namespace) -> int:
    convert(
        options.source,
        options.target,
        options.to,
        key=options.key,
        dtype=_DTYPES[options.dtype] if options.dtype else None,
        max_file_nbytes=options.max_file_nbytes,
        progress=_show("bytes"),
    )
    return 0


def _gc(options: argparse.Namespace) -> int:
    removed = remove_older(
        options.directory,
        keep_last=options.keep,
        prefix=options.prefix,
        thorough=options.thorough,
        dry_run=options.dry_run,
    )
    for path in removed:
        print(f"would delete {path}" if options.dry_run else f"deleted {path}")
    return 0


def _show(unit: str) -> Callable[[int, int], None]:
    """Return what shows progress on a terminal."""
    shown = [-1]

    def show(done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if sys.stderr.isatty() and percent != shown[0]:
            shown[0] = percent
            counts = (
                f"{amount(done)} of {amount(total)}" if unit == "bytes" else f"{done} of {total}"
            )
            end = "\n" if done == total else ""
            print(f"\r{counts} {unit}   ", end=end, file=sys.stderr, flush=True)

    return show

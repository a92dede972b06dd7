"""Describe in lines of text what a checkpoint holds."""

from __future__ import annotations

import json

from vescale_ckpt._format.manifest import Manifest
from vescale_ckpt._format.state_tree import (
    Json,
    elements_of,
    has_references,
    is_reference,
    items_of,
    key_of,
)

_MAX_VALUE_LENGTH = 60


def describe(manifest: Manifest) -> list[str]:
    """Return the lines that ``inspect`` prints."""
    lines = [f"{amount(file.nbytes):>10}  {name}" for name, file in manifest.files.items()]
    total = sum(tensor.nbytes for tensor in manifest.tensors.values())
    lines += [f"{amount(total):>10}  in {len(manifest.tensors)} tensors", ""]
    for key, node in manifest.tree.items():
        lines += _node_lines(manifest, key, node, 0)
    return lines


def _node_lines(manifest: Manifest, key: str | int, node: Json, depth: int) -> list[str]:
    indent = "  " * depth
    if is_reference(node):
        reference = key_of(node)
        stored = manifest.stored(reference)
        alias = manifest.aliases.get(reference)
        shape = "x".join(map(str, stored.shape)) or "scalar"
        same = f", the same as {alias}" if alias else ""
        return [f"{indent}{key}: {stored.dtype} {shape}, {amount(stored.nbytes)}{same}"]
    children = items_of(node)
    if children is None and (elements := elements_of(node)) is not None:
        children = list(enumerate(elements))
    text = json.dumps(node)
    if not children or (len(text) <= _MAX_VALUE_LENGTH and not has_references(node)):
        return [f"{indent}{key} = {text[:_MAX_VALUE_LENGTH]}"]
    lines = [f"{indent}{key}"]
    for name, child in children:
        lines += _node_lines(manifest, name, child, depth + 1)
    return lines


def amount(nbytes: int) -> str:
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.4g} {unit}"
        amount /= 1000
    return f"{amount:.4g} TB"

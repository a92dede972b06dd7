"""JSON in which no object has two members of one name."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def strict_json(text: bytes | str) -> Any:
    """Return the value of a JSON text; two members of one name are a ValueError."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has {count} members called {name!r}")
    return members

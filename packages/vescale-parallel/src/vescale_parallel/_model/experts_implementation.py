"""How experts of transformers' models are computed, while a forward is only looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def experts_without_values(model: nn.Module) -> Iterator[bool]:
    """Have experts whose loop runs over those that got tokens multiply in a batch for a while.

    The axes of their parameters are the same, and which expert gets a token need not be known.
    Yields whether there are such experts.
    """
    with contextlib.ExitStack() as stack:
        changed = False
        for module in model.modules():
            owner: Any = module
            if not callable(getattr(owner, "get_experts_implementation", None)):
                continue
            held: dict[str, str | None] = owner.get_experts_implementation()
            if "eager" not in held.values():
                continue
            stack.callback(owner.set_experts_implementation, held)
            owner.set_experts_implementation(
                {key: "batched_mm" if how == "eager" else how for key, how in held.items()}
            )
            changed = True
        yield changed

"""Code that torch.utils.checkpoint runs again in backward, where losses are computed as before.

[Note: losses that run again] Backward comes when a call is over, and with it what divides losses
by the counts of all parts. A region that runs again would count its own targets then, and its
gradients were those of another loss. Torch has an object for each region with the function to run:
where a loss is computed within one, that function is put into what divides by the counts that are
known from the first run. Also for blocks that are recomputed because a plan says so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

Around = Callable[[], AbstractContextManager[Any]]

_CHECKPOINT = "torch.utils.checkpoint"
_IS_WITHIN = "_vescale_runs_within"


def run_again_within(around: Callable[[], Around]) -> None:
    """Have regions that run now, and that nothing is put around yet, run again in a context.

    ``around`` is called for them, and returns what makes the context.
    """
    for region, name in _regions():
        if not hasattr(region, _IS_WITHIN):
            setattr(region, _IS_WITHIN, True)
            setattr(region, name, _within(around(), getattr(region, name)))


def _within(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return again


def _regions() -> Iterator[tuple[object, str]]:
    """Yield torch's objects for the regions that run for the first time, innermost first.

    And the attributes that hold what is to run again.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            found = frame.f_locals
            generator, reentrant = found.get("gen"), found.get("ctx")
            if inspect.isgenerator(generator) and generator.gi_frame is not None:
                region = generator.gi_frame.f_locals.get("new_frame")
                if hasattr(region, "recompute_fn"):
                    yield region, "recompute_fn"
            elif frame.f_code.co_name == "forward" and hasattr(reentrant, "run_function"):
                yield reentrant, "run_function"
        frame = frame.f_back

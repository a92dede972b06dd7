"""When a rank fails, the ranks that wait for it say who it was.

A rank that raises writes its name and error to the rendezvous store. A collective that
breaks (a timeout, a closed connection) looks there before it raises.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import torch.distributed as dist

from ._torch_private import default_store

_KEY = "vescale/failed_rank"


class PeerError(RuntimeError):
    """Another rank failed, so a collective could not finish."""


@contextlib.contextmanager
def announced_failures() -> Iterator[None]:
    """Tell the other ranks about an exception that leaves this block."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        announce(error)
        raise


def announce(error: BaseException) -> None:
    """Write this rank's failure where waiting ranks look; the first failure is kept."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    text = f"rank {dist.get_rank()} raised {type(error).__name__}: {str(error)[:2000]}"
    # The store may be gone when the whole job is going down; the error itself still rises.
    with contextlib.suppress(RuntimeError):
        default_store().compare_set(_KEY, "", text)


@contextlib.contextmanager
def named_failures() -> Iterator[None]:
    """Turn a broken collective into an error that names the rank that failed."""
    try:
        yield
    except RuntimeError as error:
        if text := _announced():
            raise PeerError(f"{text}; this rank ({dist.get_rank()}) was waiting for it") from error
        announce(error)
        raise


def _announced() -> str:
    with contextlib.suppress(RuntimeError):
        store = default_store()
        if store.check([_KEY]):
            store.set_timeout(datetime.timedelta(seconds=5))
            text = store.get(_KEY).decode()
            own = f"rank {dist.get_rank()} "
            return "" if text.startswith(own) else text
    return ""

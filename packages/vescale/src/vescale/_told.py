"""What is wrong with a call on one rank is told to all: they are about to wait for it.

[Note: told calls]
What a rank is given is looked at before it meets the others in vescale-ckpt. If it cannot go there
it goes nevertheless, with something that raises the error as soon as it is looked at: there it
becomes an error of every rank. Where all is well nothing is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

import vescale_ckpt


@contextlib.contextmanager
def told_to_exporters() -> Iterator[None]:
    """Raise an error that leaves this block on the ranks that wait in an export, too."""
    with _told(lambda error: vescale_ckpt.save_safetensors("", {}, together=error)):
        yield


@contextlib.contextmanager
def told_to_loaders() -> Iterator[None]:
    """Raise an error that leaves this block on the ranks that wait in ``load_pretrained``, too."""
    with _told(lambda error: vescale_ckpt.load_safetensors("", nn.Module(), only=error)):
        yield


@contextlib.contextmanager
def _told(tell: Callable[[Iterator[Any]], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        trace = error.__traceback__
        with contextlib.suppress(vescale_ckpt.CheckpointError):
            tell(_raises(error))
        error.__traceback__ = trace  # without the frames of the telling
        raise


def _raises(error: Exception) -> Iterator[Any]:
    raise error
    yield

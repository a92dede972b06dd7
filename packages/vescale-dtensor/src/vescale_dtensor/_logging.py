"""Loggers of packages: silent until a program asks, and what was decided is said once."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist


def package_logger(name: str) -> logging.Logger:
    """Return the logger of a package, set up as a library's should be.

    It prints nothing by itself. INFO is what was decided, the same on all ranks: only rank 0 lets
    it through. DEBUG, which is about one rank, and warnings come from every rank; records have an
    attribute ``rank`` for formats.

    Args:
        name: ``vescale.`` and the package, so that ``logging.getLogger("vescale")`` is above all.
    """
    logger = logging.getLogger(name)
    if not any(isinstance(each, _ByRank) for each in logger.filters):
        logger.addFilter(_ByRank())
        logger.addHandler(logging.NullHandler())
    return logger


class _ByRank(logging.Filter):
    """Lets INFO through on rank 0 alone, and notes the rank."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        record.rank = rank
        return rank == 0 or record.levelno != logging.INFO

"""The private parts of torch (2.11 to 2.14) that let a rank have many process groups.

[Note: one loop]
Each gloo group brings a device whose thread looks for messages a hundred times a second. Meshes
make groups, and a rank that has run many tests has a hundred of them: the threads of four such
ranks took half a processor, doing nothing. A device can serve any number of groups, so here one
serves all groups of a rank.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_DEFAULT_TIMEOUT = timedelta(minutes=30)


def serve_all_groups_by_one_thread() -> None:
    """Let all gloo groups made from now on share a device; see [Note: one loop]."""
    gloo = dist.ProcessGroupGloo
    make = gloo.__init__
    device = gloo.create_device(interface=os.environ.get("GLOO_SOCKET_IFNAME", ""))

    def make_with_device(
        self: dist.ProcessGroupGloo,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        **_: object,  # since torch 2.14, whether ranks may come and go
    ) -> None:
        options = gloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [device]
        options._threads = 2
        options._timeout = timeout
        make(self, store, rank, size, options)

    gloo.__init__ = make_with_device

"""What torch.distributed does in this process while ranks are threads.

Programs start, name and end process groups as always; only where torch would connect to other
processes it gets what connects threads. Everything is as before when the emulation ends.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._torch_private import distributed_c10d, isolate_threads

from .baton import Baton
from .exchanges import Exchanges
from .process_group import Options, ThreadGroup
from .store import ThreadStore

_mesh_owners = itertools.count(1)


@contextmanager
def connecting_threads(baton: Baton, world_size: int) -> Iterator[None]:
    """Have the process groups of ranks connect threads."""
    connections = _Connections(baton, world_size)
    replaced = {
        "rendezvous": connections.rendezvous,
        "ProcessGroupGloo": connections.gloo,
        "ProcessGroupNCCL": connections.nccl,
        "is_nccl_available": lambda: True,
    }
    missing = object()
    before = {name: getattr(distributed_c10d, name, missing) for name in replaced}
    init_mesh = DeviceMesh.__init__
    isolate_threads(True)
    try:
        for name, value in replaced.items():
            setattr(distributed_c10d, name, value)
        DeviceMesh.__init__ = connections.owned_mesh(init_mesh)
        yield
    finally:
        DeviceMesh.__init__ = init_mesh
        for name, value in before.items():
            if value is missing:
                delattr(distributed_c10d, name)
            else:
                setattr(distributed_c10d, name, value)
        isolate_threads(False)


class _Connections:
    def __init__(self, baton: Baton, world_size: int) -> None:
        self._baton, self._world_size = baton, world_size
        self._store = ThreadStore(baton)
        self._exchanges = Exchanges(baton, self._store)
        self._num_groups = itertools.count()
        self._uses: Counter[tuple[int, bytes]] = Counter()
        self._owners = [next(_mesh_owners) for _ in range(world_size)]
        connections = self

        class Group(ThreadGroup):
            """Made in place of gloo's, whose class torch asks for."""

            def __init__(
                self,
                store: Any,
                rank: int,
                size: int,
                timeout: timedelta | None = None,
                **_: Any,  # newer than 2.13: whether the group may be made again with other ranks
            ) -> None:
                key = connections.key_of(store)
                super().__init__(connections.exchanges, key, rank, size, timeout)

        class GroupWithOptions(Group):
            """Made in place of NCCL's."""

            Options = Options

            def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
                super().__init__(store, rank, size, getattr(options, "_timeout", None))
                self.options = options

        self.gloo, self.nccl = Group, GroupWithOptions

    @property
    def exchanges(self) -> Exchanges:
        """Where the ranks meet."""
        return self._exchanges

    def rendezvous(self, *args: Any, **kwargs: Any) -> Iterator[tuple[ThreadStore, int, int]]:
        """Yield the store, and which rank of how many this one is."""
        assert self._baton.current is not None
        yield self._store, self._baton.current, self._world_size

    def key_of(self, store: Any) -> tuple[bytes, int]:
        """Return what the ranks of one group know it by, and no other group has."""
        made = store.compare_set("threads", "", str(next(self._num_groups)))
        rank = self._baton.current
        assert rank is not None
        # A name is used again for a group that was made after the first one ended.
        self._uses[rank, made] += 1
        return made, self._uses[rank, made]

    def owned_mesh(self, init_mesh: Callable[..., None]) -> Callable[..., None]:
        """Return what makes meshes that differ from the equal ones of other ranks.

        torch does so for its own threaded groups: what is cached for a mesh holds for one rank.
        """

        def init(mesh: Any, *args: Any, **kwargs: Any) -> None:
            init_mesh(mesh, *args, **kwargs)
            if self._baton.current is not None:
                mesh._thread_id = self._owners[self._baton.current]
                mesh._hash = None

        return init

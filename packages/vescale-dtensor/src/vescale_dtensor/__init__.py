"""Distributed tensors: where the elements are, and operators that never lie about them.

The names of ``torch.distributed.tensor`` are here with the same meaning: ``DTensor`` is a subclass
of torch's, and ``distribute_tensor``, ``distribute_module``, ``zeros`` and the other factories
make it. Placements are torch's own and those of this package.

The rooms, in the order in which a call of an operator passes through them:

- ``_register``, ``_dispatch``: what happens to an operator, and remembering it.
- ``_rules``: the rules, one family of operators a file.
- ``_sharding``: a call, its signature, the cheapest options, the plan that runs locally.
- ``_tensor``: the tensor, what makes one, what checkpoints ask of it.
- ``_redistribute``: from one layout to another: steps, who sends what to whom, then bytes.
- ``_comm``: collectives, between processes or the parts of one, and their failures.
- ``_layout``: which elements a rank holds: placements, boxes, layouts, reshapes.
- ``_rank_threads``: all ranks of a program in this process, for a debugger.
- ``random``: the room that emulates torch's generators.
- ``_debug``: ``explain``, ``CommCounter``, ``visualize``, ``forbid_gathers``.
"""

from torch.distributed.tensor import (
    Partial as Partial,
    Placement as Placement,
    Replicate as Replicate,
    Shard as Shard,
)

from ._caches import own_list as own_list, own_variable as own_variable
from ._comm.asynchronous import (
    CollectiveWork as CollectiveWork,
    start_all_gather as start_all_gather,
    start_all_reduce as start_all_reduce,
    start_all_to_all as start_all_to_all,
    start_reduce_scatter as start_reduce_scatter,
)
from ._comm.collectives import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    all_to_all as all_to_all,
    ordered_sum as ordered_sum,
    reduce_scatter as reduce_scatter,
)
from ._comm.emulation import (
    EmulatedWorld as EmulatedWorld,
    RankTensor as RankTensor,
    emulate as emulate,
)
from ._comm.events import Communication as Communication
from ._comm.failures import (
    PeerError as PeerError,
    announced_failures as announced_failures,
    named_failures as named_failures,
)
from ._comm.positions import find_positions_by as find_positions_by
from ._comm.profiling import (
    listening_to_ranges as listening_to_ranges,
    name_group as name_group,
    profiler_range as profiler_range,
)
from ._comm.waiting import abandon as abandon, while_waiting as while_waiting
from ._compiler import leave_uncompiled as leave_uncompiled
from ._debug.comm_counter import CommCounter as CommCounter
from ._debug.explain import Explanation as Explanation, Operation as Operation, explain as explain
from ._debug.forbid_gathers import (
    GatherForbiddenError as GatherForbiddenError,
    forbid_gathers as forbid_gathers,
)
from ._debug.visualize import layout_text as layout_text, visualize as visualize
from ._layout.boxes import (
    Box as Box,
    LocalBox as LocalBox,
    local_boxes as local_boxes,
    local_shape as local_shape,
)
from ._layout.placements import (
    InterleavedShard as InterleavedShard,
    RaggedShard as RaggedShard,
    is_sharded as is_sharded,
)
from ._logging import package_logger as package_logger
from ._rank_threads.baton import DeadlockError as DeadlockError
from ._rank_threads.run_ranks import run_ranks as run_ranks
from ._register import register_rules, register_with_torch
from ._sharding.op_call import Unsupported as Unsupported
from ._sharding.replicate_fallback import GatherWarning as GatherWarning, strict as strict
from ._tensor.distribute_module import distribute_module as distribute_module
from ._tensor.distribute_tensor import distribute_tensor as distribute_tensor
from ._tensor.dtensor import DTensor as DTensor
from ._tensor.factories import (
    empty as empty,
    full as full,
    manual_seed as manual_seed,
    ones as ones,
    rand as rand,
    randn as randn,
    zeros as zeros,
)
from ._tensor.plain_operands import tell_plain_operands as tell_plain_operands, untold as untold
from ._tensor.watched_memory import WatchedMemory as WatchedMemory

__version__ = "0.1.0"
__all__ = [
    "Box",
    "CollectiveWork",
    "CommCounter",
    "Communication",
    "DTensor",
    "DeadlockError",
    "EmulatedWorld",
    "Explanation",
    "GatherForbiddenError",
    "GatherWarning",
    "InterleavedShard",
    "LocalBox",
    "Operation",
    "Partial",
    "PeerError",
    "Placement",
    "RaggedShard",
    "RankTensor",
    "Replicate",
    "Shard",
    "Unsupported",
    "WatchedMemory",
    "abandon",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "announced_failures",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "emulate",
    "explain",
    "find_positions_by",
    "forbid_gathers",
    "full",
    "is_sharded",
    "layout_text",
    "leave_uncompiled",
    "listening_to_ranges",
    "local_boxes",
    "local_shape",
    "manual_seed",
    "name_group",
    "named_failures",
    "ones",
    "ordered_sum",
    "own_list",
    "own_variable",
    "package_logger",
    "profiler_range",
    "rand",
    "randn",
    "reduce_scatter",
    "run_ranks",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
    "strict",
    "tell_plain_operands",
    "untold",
    "visualize",
    "while_waiting",
    "zeros",
]

register_rules()
register_with_torch()

leave_uncompiled(__name__)

import torch.distributed.tensor

import vescale_dtensor


def test_public_names_are_these() -> None:
    assert vescale_dtensor.__all__ == [
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
    for name in vescale_dtensor.__all__:
        assert hasattr(vescale_dtensor, name)


def test_the_names_that_make_tensors_in_torch_are_here_too() -> None:
    names = ["DTensor", "Partial", "Placement", "Replicate", "Shard", "distribute_module"]
    names += ["distribute_tensor", "empty", "full", "ones", "rand", "randn", "zeros"]
    for name in names:
        assert name in torch.distributed.tensor.__all__
        assert name in vescale_dtensor.__all__

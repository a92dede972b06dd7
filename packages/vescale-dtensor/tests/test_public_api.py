import vescale_dtensor


def test_public_names_are_these() -> None:
    assert vescale_dtensor.__all__ == [
        "Box",
        "DTensor",
        "GatherWarning",
        "InterleavedShard",
        "LocalBox",
        "PeerError",
        "RaggedShard",
        "all_gather",
        "all_reduce",
        "announced_failures",
        "distribute_tensor",
        "is_sharded",
        "local_boxes",
        "local_shape",
        "named_failures",
        "reduce_scatter",
    ]
    for name in vescale_dtensor.__all__:
        assert hasattr(vescale_dtensor, name)

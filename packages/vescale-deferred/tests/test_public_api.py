import vescale_deferred


def test_the_public_names_are_these():
    assert sorted(vescale_deferred.__all__) == [
        "CannotDefer",
        "DeferredError",
        "DeferredWarning",
        "ReadError",
        "ShardMaker",
        "deferred_init",
        "is_deferred",
        "materialize",
        "read",
    ]

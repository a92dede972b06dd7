import vescale_deferred


def test_the_public_names_are_these():
    assert sorted(vescale_deferred.__all__) == [
        "CannotDefer",
        "DeferredError",
        "DeferredWarning",
        "ReadError",
        "ShardMaker",
        "deferred_init",
        "fingerprint",
        "is_deferred",
        "materialize",
        "read",
        "skip_init",
    ]

import vescale_deferred


def test_the_public_names_are_these():
    assert sorted(vescale_deferred.__all__) == [
        "CannotDefer",
        "DeferredError",
        "DeferredWarning",
        "ReadError",
        "RecordedDraws",
        "ShardMaker",
        "deferred_init",
        "fingerprint",
        "fingerprints",
        "is_deferred",
        "materialize",
        "read",
        "recorded_draws",
        "replace_draws",
        "skip_init",
    ]

import inspect

import vescale


def test_public_names_are_these() -> None:
    assert vescale.__all__ == [
        "CheckpointError",
        "Cluster",
        "MemoryReport",
        "ParallelPlan",
        "PeerError",
        "Progress",
        "Span",
        "Spike",
        "SpikeWatch",
        "Timeline",
        "TimelineSummary",
        "VerifyReport",
        "data_parallel_rank",
        "declare_matrices",
        "declare_optimizer",
        "deferred_init",
        "detect_nonfinite",
        "detect_spikes",
        "emulate",
        "export",
        "generate_plan",
        "load",
        "load_pretrained",
        "memory_report",
        "parallelize",
        "save",
        "timeline",
        "verify",
    ]
    for name in vescale.__all__:
        assert hasattr(vescale, name)


def test_the_five_calls_take_these_arguments() -> None:
    def names(function: object) -> list[str]:
        assert callable(function)
        return [str(p).split(":")[0] for p in inspect.signature(function).parameters.values()]

    assert names(vescale.deferred_init)[0] == "module_or_factory"
    assert names(vescale.generate_plan) == [
        "model", "constraints", "world_size", "cluster", "example_batch", "optimizer",
    ]  # fmt: skip
    assert names(vescale.parallelize) == [
        "plan", "model", "optimizer_fn", "lr_scheduler_fn", "dataset", "loss_fn",
    ]  # fmt: skip
    assert names(vescale.save) == ["path", "state", "keep_last"]
    assert names(vescale.load) == ["path", "state", "strict", "only", "rename", "cast"]

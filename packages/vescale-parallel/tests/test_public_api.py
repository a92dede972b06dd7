import vescale_parallel


def test_public_names_are_these() -> None:
    assert vescale_parallel.__all__ == [
        "Batch",
        "ContextParallel",
        "DataParallel",
        "Estimate",
        "ExpertParallel",
        "ModelSignature",
        "Observation",
        "ObservationError",
        "ParallelLoader",
        "ParallelPlan",
        "PipelineParallel",
        "Precision",
        "TensorParallel",
        "block_stacks",
        "check_constraints",
        "constraint_keys",
        "model_signature",
        "modules_outside_blocks",
        "observe",
        "parallelize",
        "pipeline_blocks",
        "read_real",
        "split_blocks",
        "tensor_parallel_plan",
        "with_constraints",
    ]
    for name in vescale_parallel.__all__:
        assert hasattr(vescale_parallel, name)

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
        "ParallelExplanation",
        "ParallelLoader",
        "ParallelPlan",
        "PipelineParallel",
        "Precision",
        "ShardingProposal",
        "TensorParallel",
        "block_stacks",
        "check_constraints",
        "check_pipeline",
        "constraint_keys",
        "data_parallel_rank",
        "explain",
        "model_signature",
        "modules_outside_blocks",
        "observe",
        "parallelize",
        "pipeline_blocks",
        "propose_sharding",
        "read_real",
        "split_blocks",
        "tensor_parallel_plan",
        "with_constraints",
    ]
    for name in vescale_parallel.__all__:
        assert hasattr(vescale_parallel, name)

import vescale_parallel


def test_public_names_are_these() -> None:
    assert vescale_parallel.__all__ == [
        "Batch",
        "CompiledBlock",
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
        "RecordedSchedule",
        "TensorParallel",
        "compile_report",
        "constraint_keys",
        "data_parallel_rank",
        "declare_matrices",
        "declare_optimizer",
        "draw_schedule",
        "expert_load",
        "explain",
        "observe",
        "observed_calls",
        "parallelize",
        "record_schedule",
        "tensor_parallel_plan",
        "with_constraints",
    ]
    for name in vescale_parallel.__all__:
        assert hasattr(vescale_parallel, name)


def test_what_the_planner_uses_besides_is_no_promise() -> None:
    for name in (
        "ExpertLayer",
        "PartCost",
        "ShardingProposal",
        "StageRule",
        "balanced_starts",
        "block_stacks",
        "called_blocks",
        "check_constraints",
        "check_micro_batches",
        "check_pipeline",
        "expert_layers",
        "give_no_layers",
        "model_signature",
        "modules_outside_blocks",
        "names_of_calls",
        "pipeline_blocks",
        "planned_experts",
        "propose_in_chunks",
        "propose_sharding",
        "state_bytes",
    ):
        assert name not in vescale_parallel.__all__
        assert hasattr(vescale_parallel, name)

import vescale_planner


def test_the_public_names_are_these() -> None:
    assert vescale_planner.__all__ == [
        "Alternative",
        "Breakdown",
        "Change",
        "Cluster",
        "Explanation",
        "Prediction",
        "RankMemory",
        "explain_plan",
        "generate_plan",
        "generate_plans",
        "predict",
    ]
    assert all(hasattr(vescale_planner, name) for name in vescale_planner.__all__)

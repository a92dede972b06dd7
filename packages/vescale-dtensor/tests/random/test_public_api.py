import vescale_dtensor.random as public


def test_public_names_are_these():
    assert public.__all__ == [
        "CudaKernels",
        "Draws",
        "Fill",
        "PhiloxDraws",
        "Point",
        "RandomOperator",
        "RandomTensor",
        "Stream",
        "Window",
        "cuda_kernels",
        "draw_part",
        "draws",
        "fill_of",
        "is_state",
        "memory_order",
        "philox_draws",
        "point_after",
        "random_operator",
        "state_after_words",
        "words_between",
        "words_of",
    ]
    for name in public.__all__:
        assert hasattr(public, name)

import vescale_dtensor.random as public


def test_public_names_are_these():
    assert public.__all__ == [
        "Draws",
        "Fill",
        "Point",
        "RandomOperator",
        "RandomTensor",
        "Stream",
        "Window",
        "draw_part",
        "draws",
        "fill_of",
        "is_state",
        "random_operator",
        "state_after_words",
        "words_of",
    ]
    for name in public.__all__:
        assert hasattr(public, name)

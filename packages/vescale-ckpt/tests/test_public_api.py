from __future__ import annotations

import vescale_ckpt


def test_the_public_names_are_these() -> None:
    assert vescale_ckpt.__all__ == [
        "AsyncSaver",
        "CheckpointError",
        "CorruptCheckpointError",
        "MismatchError",
        "SavedTensor",
        "StateTemplate",
        "Stateful",
        "load",
        "load_safetensors",
        "save",
    ]
    assert all(hasattr(vescale_ckpt, name) for name in vescale_ckpt.__all__)

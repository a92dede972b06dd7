from __future__ import annotations

import vescale_ckpt


def test_the_public_names_are_these() -> None:
    assert vescale_ckpt.__all__ == [
        "AsyncSaver",
        "CheckpointError",
        "CorruptCheckpointError",
        "MismatchError",
        "PerRank",
        "RngState",
        "SavedTensor",
        "StateTemplate",
        "Stateful",
        "export_dcp",
        "export_safetensors",
        "import_dcp",
        "import_safetensors",
        "latest",
        "list_checkpoints",
        "load",
        "load_dcp",
        "load_safetensors",
        "remove_older",
        "save",
        "save_safetensors",
    ]
    assert all(hasattr(vescale_ckpt, name) for name in vescale_ckpt.__all__)

"""Save and load distributed training state, across any change of layout, without pickle.

The rooms, in the order in which a state passes through them:

- ``_state``: a state as this rank holds it: shards, keys that are wanted, random generators
- ``_comm``: the ranks that save or load together, and an error on one that becomes one on all
- ``_save``: ranks agree on a plan, write shared files or one each, and commit
- ``_format``: what lies in the files, as pure data: layout, manifest, blocks, checksums
- ``_io``: bytes to and from disks and object stores
- ``_store``: committed checkpoints: appear whole, are read and checked, listed and deleted
- ``_load``: a state is matched with the manifest, ranks divide the blocks, read and exchange them
- ``_interop``: HuggingFace's files and those of torch.distributed.checkpoint
- ``_tools``, ``cli``: what people see of a checkpoint

Names are imported when they are first used: ``import vescale_ckpt`` alone costs nothing, though
its functions need torch's and vescale-dtensor's distributed tensors.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._interop.dcp_export import export_dcp as export_dcp
    from ._interop.dcp_import import import_dcp as import_dcp, load_dcp as load_dcp
    from ._interop.huggingface_export import (
        export_safetensors as export_safetensors,
        import_safetensors as import_safetensors,
    )
    from ._interop.huggingface_load import load_safetensors as load_safetensors
    from ._interop.huggingface_save import save_safetensors as save_safetensors
    from ._load.load import load as load
    from ._save.async_saver import AsyncSaver as AsyncSaver
    from ._save.save import save as save
    from ._state.rng_state import RngState as RngState
    from ._store.retention import (
        latest as latest,
        list_checkpoints as list_checkpoints,
        remove_older as remove_older,
    )
    from .exceptions import (
        CheckpointError as CheckpointError,
        CorruptCheckpointError as CorruptCheckpointError,
        MismatchError as MismatchError,
    )
    from .types import (
        PerRank as PerRank,
        SavedTensor as SavedTensor,
        Stateful as Stateful,
        StateTemplate as StateTemplate,
    )

__version__ = "0.1.0"
__all__ = [
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

# Where each name is defined.
_HOMES = {
    "AsyncSaver": "._save.async_saver",
    "CheckpointError": ".exceptions",
    "CorruptCheckpointError": ".exceptions",
    "MismatchError": ".exceptions",
    "PerRank": ".types",
    "RngState": "._state.rng_state",
    "SavedTensor": ".types",
    "StateTemplate": ".types",
    "Stateful": ".types",
    "export_dcp": "._interop.dcp_export",
    "export_safetensors": "._interop.huggingface_export",
    "import_dcp": "._interop.dcp_import",
    "import_safetensors": "._interop.huggingface_export",
    "latest": "._store.retention",
    "list_checkpoints": "._store.retention",
    "load": "._load.load",
    "load_dcp": "._interop.dcp_import",
    "load_safetensors": "._interop.huggingface_load",
    "remove_older": "._store.retention",
    "save": "._save.save",
    "save_safetensors": "._interop.huggingface_save",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

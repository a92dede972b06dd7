"""Save and load distributed training state, across any change of layout, without pickle."""

from ._async import AsyncSaver as AsyncSaver
from ._dcp import import_dcp as import_dcp, load_dcp as load_dcp
from ._dcp_export import export_dcp as export_dcp
from ._export import (
    export_safetensors as export_safetensors,
    import_safetensors as import_safetensors,
)
from ._huggingface import load_safetensors as load_safetensors
from ._load import load as load
from ._rng import RngState as RngState
from ._save import save as save
from ._series import (
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
]

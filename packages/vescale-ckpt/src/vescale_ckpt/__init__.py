"""Save and load distributed training state, across any change of layout, without pickle."""

from ._async import AsyncSaver as AsyncSaver
from ._huggingface import load_safetensors as load_safetensors
from ._load import load as load
from ._save import save as save
from ._template import SavedTensor as SavedTensor, StateTemplate as StateTemplate
from ._tree import Stateful as Stateful
from .exceptions import (
    CheckpointError as CheckpointError,
    CorruptCheckpointError as CorruptCheckpointError,
    MismatchError as MismatchError,
)

__version__ = "0.1.0"
__all__ = [
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

"""Imported once by the fork server, so that no rank has to import torch again."""

from importlib import import_module
from importlib.util import find_spec

from ._pytest_private import rewrite_asserts

_ALWAYS = (
    "torch._dynamo",  # the first DTensor call imports it
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
)
_MODELS = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)

for name in _ALWAYS + (_MODELS if find_spec("transformers") else ()):
    import_module(name)
rewrite_asserts()

"""Imported once by the fork server, so that no rank has to import torch again."""

import gc
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
# Those that this environment has: a rank would take a second to import them all.
_TESTED = (
    "vescale_dtensor",
    "vescale_deferred",
    "vescale_ckpt",
    "vescale_parallel",
    "vescale_planner",
    "vescale",
)

for name in _ALWAYS + (_MODELS if find_spec("transformers") else ()):
    import_module(name)
for name in filter(find_spec, _TESTED):
    import_module(name)
rewrite_asserts()
# No rank looks through the million objects of these modules for garbage, or copies their pages.
gc.freeze()

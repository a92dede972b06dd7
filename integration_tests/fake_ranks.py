"""One rank of many that runs alone, and the model that it trains.

Its process group is torch's fake one, whose collectives return at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701 (as torch's tests)
from transformers import LlamaConfig, LlamaForCausalLM

WARM_UP = 5  # what ranks are called with is compared in the first calls
IDS = torch.zeros(1, 8, dtype=torch.long)


@contextmanager
def rank_0_of(ranks: int) -> Iterator[None]:
    """Make this process one rank of many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def llama(layers: int = 4) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

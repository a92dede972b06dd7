"""CPU time, peak memory and bytes of expert parallelism, beside transformers' own.

    python benchmarks/moe.py [--ranks 2] [--steps 4] [--repeats 3] [--only "expert" ...]

Trains a Qwen3-MoE of 21 million parameters, of which 17 million are in 16 experts a layer, with
AdamW on as many rows a rank. Every contender runs in processes of its own: gloo, one thread a
rank; of ``one device`` every rank trains on the rows of all. Contenders alternate; figures are
medians over repeats, of the mean over ranks. CPU time is user and system time of a step; memory is
the peak of resident memory, and how far that is above what imports took. Prints JSON; ``ratio`` is
to the best peer (``PEERS``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from side_by_side.contenders import (
    VOCABULARY,
    Trained,
    adamw,
    alternated,
    begun,
    chosen,
    end,
    random_ids,
    timed,
    told,
    with_optimizer,
)
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import vescale

ROWS, LENGTH = 4, 64  # of a rank
_ONE_DEVICE = "one device"
PEERS = {
    "vescale expert parallelism": (
        "transformers' expert parallelism",
        "vescale data parallelism",
        _ONE_DEVICE,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="parts of the contenders' names")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        run(options.contender, options.steps)
        return
    names = chosen([*contenders(options.ranks)], options.only)
    medians = alternated(
        __file__, names, options.ranks, options.repeats, [f"--steps={options.steps}"]
    )
    heading = {"ranks": options.ranks, "torch": torch.__version__}
    print(json.dumps(heading | told(medians, PEERS), indent=2))


def run(name: str, steps: int) -> None:
    """Train as one rank of a contender; rank 0 prints its figures as JSON."""
    imported = begun()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer = contenders(ranks)[name]()
    is_alone = name == _ONE_DEVICE
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        ids_BS = random_ids(generator, ROWS * ranks, LENGTH)
        ids_BS = ids_BS if is_alone else ids_BS.chunk(ranks)[rank]
        loss = model(input_ids=ids_BS, labels=ids_BS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    end(timed(step, steps, imported))


def contenders(ranks: int) -> dict[str, Callable[[], Trained]]:
    """Return what is compared; each makes a fresh model and its optimizer."""
    return {
        _ONE_DEVICE: lambda: with_optimizer(fresh()),
        "vescale data parallelism": lambda: ours({"data_parallel.size": ranks}),
        "transformers' expert parallelism": lambda: theirs(ranks),
        "vescale expert parallelism": lambda: ours(
            {"data_parallel.size": ranks, "expert_parallel.size": ranks}
        ),
    }


def fresh() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"head_dim": 64}
    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=352, num_experts=16,
        num_experts_per_tok=2, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=VOCABULARY, use_cache=False, **sizes,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def ours(constraints: dict[str, Any]) -> Trained:
    model = fresh()
    plan = vescale.generate_plan(model, {"data_parallel.zero_stage": 0, **constraints})
    return vescale.parallelize(plan, model, adamw)


def theirs(ranks: int) -> Trained:
    """Send tokens to experts by transformers itself; the rest is FSDP2's."""
    from transformers.distributed.configuration_utils import DistributedConfig

    told_by_first = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told_by_first)
    whole: Any = fresh()
    whole.save_pretrained(told_by_first[0])  # by the first rank alone
    dist.barrier()
    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
    model: Any = AutoModelForCausalLM.from_pretrained(
        told_by_first[0], distributed_config=config, use_cache=False
    )
    # torch's foreach loops take no lists of plain tensors and DTensors.
    model.train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


if __name__ == "__main__":
    main()

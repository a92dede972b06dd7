"""What sums in a fixed tree cost: CPU time of a step of two tensor-parallel ranks with them.

    python benchmarks/invariant.py [--hidden 1024] [--layers 2] [--vocabulary 1024] [--tokens 512]

A Llama is trained under two plans in turns, which differ in ``numerics`` alone; each is the first
of every other turn. Prints JSON: the median CPU seconds of a step, of both ranks together, the
median of the ratios of turns, with the quartiles, and whether losses of the invariant plan have
the bits of one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

import vescale
from vescale_parallel import TensorParallel

_NUM_WARM = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        _start(_train, 2, options, path)
        found = json.loads(path.read_text())
        _start(_losses_of_one, 1, options, path)
        one = json.loads(path.read_text())
    found["bits of one rank"] = found.pop("losses") == one
    print(json.dumps({**options, **found}))


def _start(function: Any, size: int, options: dict[str, Any], path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    mp.spawn(  # pyright: ignore[reportPrivateImportUsage]
        _rank, (function, size, port, options, path), size
    )


def _rank(
    rank: int, function: Any, size: int, port: int, options: dict[str, Any], path: Path
) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    function(options, path)
    dist.destroy_process_group()


def _trainer(options: dict[str, Any], size: int, numerics: Any) -> Any:
    hidden, vocabulary = options["hidden"], options["vocabulary"]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=options["layers"],
        num_attention_heads=8,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    made = LlamaForCausalLM(config).to(getattr(torch, options["dtype"]))
    chunks = {"numerics_chunks": options["chunks"]} if numerics == "invariant" else {}
    plan = vescale.ParallelPlan(
        tensor_parallel=TensorParallel(size=size, sequence=options["sequence"]),
        numerics=numerics,
        **chunks,
    )
    model, optimizer = vescale.parallelize(plan, made, torch.optim.AdamW)
    ids = torch.randint(0, vocabulary, (2, options["tokens"] // 2))

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _train(options: dict[str, Any], path: Path) -> None:
    plans = ("default", "invariant")
    steps = {numerics: _trainer(options, 2, numerics) for numerics in plans}
    seconds: dict[str, list[float]] = {numerics: [] for numerics in plans}
    losses: list[float] = []
    for turn in range(_NUM_WARM + options["repeats"]):
        for numerics in plans[:: 1 if turn % 2 else -1]:
            step = steps[numerics]
            dist.barrier()
            begin = time.process_time()
            loss = step()
            taken = torch.tensor([time.process_time() - begin])
            dist.all_reduce(taken)
            if numerics == "invariant":
                losses.append(loss)
            if turn >= _NUM_WARM:
                seconds[numerics].append(taken.item())
    pairs = zip(seconds["invariant"], seconds["default"], strict=True)
    quartiles = statistics.quantiles((ours / default for ours, default in pairs), n=4)
    found = {
        **{f"{numerics} CPU s": round(statistics.median(s), 4) for numerics, s in seconds.items()},
        "ratio": round(quartiles[1], 3),
        "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        "losses": losses,
    }
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))


def _losses_of_one(options: dict[str, Any], path: Path) -> None:
    step = _trainer(options, 1, "invariant")
    path.write_text(json.dumps([step() for _ in range(_NUM_WARM + options["repeats"])]))


if __name__ == "__main__":
    main()

"""What a timeline costs the host: spans of a step, and microseconds a span.

    python benchmarks/timeline.py [--layers 8] [--hidden 256] [--repeats 15]

A Llama of one rank trains in pairs of steps, one with a timeline and one without, in turns. Prints
JSON: spans of a step, CPU time of the quickest step without, what the quickest one has besides for
each span, and what a range costs that only the timeline hears of, in microseconds; and that cost
for all spans of a step as a share of the step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vescale
from vescale_dtensor import profiler_range

_NUM_RANGES = 10_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        vocab_size=1000,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(
        vescale.ParallelPlan(), LlamaForCausalLM(config), torch.optim.AdamW
    )
    ids = torch.randint(0, 1000, (2, 128))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def ranges() -> None:
        for number in range(_NUM_RANGES):
            with profiler_range("range", number):
                pass

    step()
    without: list[float] = []
    during: list[float] = []
    num_spans = 1
    for _ in range(options.repeats):
        without.append(_cpu_seconds(step))
        with vescale.timeline(model) as timeline:
            during.append(_cpu_seconds(step))
        num_spans = len(timeline.spans)
    with vescale.timeline(model):
        seconds = _cpu_seconds(ranges)
    print(
        json.dumps(
            {
                "spans": num_spans,
                "us_a_step": 1e6 * min(without),
                "us_a_span": 1e6 * (min(during) - min(without)) / num_spans,
                "us_a_range": 1e6 * seconds / _NUM_RANGES,
                "share": num_spans * seconds / _NUM_RANGES / min(without),
            }
        )
    )


def _cpu_seconds(run: Callable[[], None]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


if __name__ == "__main__":
    main()

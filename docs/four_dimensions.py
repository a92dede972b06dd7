"""Train four models on one device and in four dimensions, and draw both (``docs/concepts``).

Pipeline, data, tensor and sequence or expert parallelism at once, on eight ranks emulated in one
process, for 50 steps of AdamW. One device runs the same micro-batches one after the other and adds
gradients up in the order of ranks; of the dense models it adds up in the chunks of the plan's
``numerics``, so all parameters after every step have to be equal to the bit. Experts see tokens in
another order than one device's do: Mixtral is compared within rounding.

python docs/four_dimensions.py [--steps 50] [--models llama ...]    prints a line of JSON a model
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import vescale
from vescale_dtensor import DTensor
from vescale_parallel import ParallelPlan, with_constraints

ROWS, LENGTH, VOCABULARY, WIDTH, BATCHES = 8, 16, 128, 64, 4
RANKS, PARTS = 2, 2  # data-parallel ranks, and micro-batches of each

SHARED: dict[str, Any] = {
    "batch.global_size": ROWS,
    "pipeline_parallel.size": 2,
    "pipeline_parallel.microbatches": PARTS,
    "data_parallel.size": RANKS,
    "data_parallel.zero_stage": 1,
    "tensor_parallel.size": 2,
}
INVARIANT: dict[str, Any] = {
    "tensor_parallel.sequence": True,
    "numerics": "invariant",
    "numerics_chunks": 2,
}
PLANS: dict[str, dict[str, Any]] = {
    "nanoGPT": SHARED | INVARIANT,
    "GPT-2": SHARED | INVARIANT,
    "Llama": SHARED | INVARIANT,
    "Mixtral": SHARED | {"expert_parallel.size": 2},
}
AXES = dict.fromkeys(PLANS, "pp 2 x dp 2 x tp 2, sequence")
AXES["Mixtral"] = "pp 2 x dp 2 (ep 2) x tp 2"

Losses = list[float]
Run = tuple[Losses, list[dict[str, Tensor]]]


class Attention(nn.Module):
    """Of nanoGPT: one projection to queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        rows, length, _ = x_BSF.shape
        q, k, v = (
            part.view(rows, length, 4, -1).transpose(1, 2)
            for part in self.c_attn(x_BSF).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    """Of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF + self.attn(self.ln_1(x_BSF))
        return x_BSF + self.c_proj(F.gelu(self.c_fc(self.ln_2(x_BSF))))


class NanoGPT(nn.Module):
    """As nanoGPT is written, with weights of its own for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BSF = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x_BSF = block(x_BSF)
        return F.cross_entropy(self.lm_head(self.ln_f(x_BSF)).flatten(0, 1), labels.flatten())


CONFIGS: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "model_type": "gpt2", "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": LENGTH,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "Llama": {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    },
    "Mixtral": {
        "model_type": "mixtral", "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_local_experts": 4,
    },
}  # fmt: skip


def build(name: str) -> nn.Module:
    """Make a model with one device's weights.

    GPT-2 has weights of its own for the head: two stages add up gradients of a tied weight stage
    by stage, one device micro-batch by micro-batch.
    """
    torch.manual_seed(0)
    if name == "nanoGPT":
        return NanoGPT()
    config = dict(CONFIGS[name])
    kind = config.pop("model_type")
    made = AutoConfig.for_model(
        kind, **config, vocab_size=VOCABULARY, tie_word_embeddings=False, use_cache=False
    )
    return AutoModelForCausalLM.from_config(made)


def batches(steps: int) -> list[dict[str, Tensor]]:
    """Return the global batch of every step; a few of them, over and over, can be learned."""
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(BATCHES)
    ]
    return [{"input_ids": ids, "labels": ids} for ids in (drawn * steps)[:steps]]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return output if isinstance(output, Tensor) else output.loss


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def in_four_dimensions(name: str, steps: int) -> Run:
    """Train as one of the ranks; an ordinary loop."""
    given = batches(steps)
    examples = [
        {key: x[row] for key, x in batch.items()} for batch in given for row in range(ROWS)
    ]
    plan = with_constraints(ParallelPlan(), PLANS[name])
    model, optimizer, loader = vescale.parallelize(plan, build(name), _adamw, dataset=examples)
    losses, states = Losses(), list[dict[str, Tensor]]()
    for batch in loader:
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        states.append(_parameters(model))
    return losses, states


def on_one_device(name: str, steps: int) -> Run:
    """Train on every rank's micro-batches in turn; plain torch but for the order of sums."""
    model, given = build(name), batches(steps)
    if "numerics" in PLANS[name]:
        alone = with_constraints(ParallelPlan(), INVARIANT | {"batch.global_size": ROWS})
        examples = [{key: x[row] for key, x in given[0].items()} for row in range(ROWS)]
        model, _ = vescale.parallelize(alone, model, dataset=examples)
    optimizer = _adamw(model)
    losses, states = Losses(), list[dict[str, Tensor]]()
    for batch in given:
        losses.append(_gradients_in_order(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        states.append(_parameters(model))
    return losses, states


def _gradients_in_order(model: nn.Module, batch: dict[str, Tensor]) -> float:
    losses, sums = list[Tensor](), list[Tensor]()
    for rank in range(RANKS):
        model.zero_grad()
        for part in range(PARTS):
            own = {n: x.chunk(RANKS * PARTS)[rank * PARTS + part] for n, x in batch.items()}
            loss = _loss(model, own)
            (loss / PARTS).backward()
            losses.append(loss.detach())
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
    for parameter, total in zip(model.parameters(), sums, strict=True):
        parameter.grad = total / RANKS
    return torch.stack(losses).double().mean().float().item()


def compared(name: str, steps: int) -> dict[str, Any]:
    """Train both ways and return what differs.

    Raises:
        RuntimeError: If ranks have different parameters or losses.
    """

    def digested() -> tuple[str, Run]:
        run = in_four_dimensions(name, steps)
        values = b"".join(x.numpy().tobytes() for state in run[1] for x in state.values())
        return hashlib.sha256(values + repr(run[0]).encode()).hexdigest(), run

    ranks = vescale.emulate(digested, 8)
    if len({digest for digest, _ in ranks}) > 1:
        raise RuntimeError(f"ranks of {name} differ")
    losses, states = ranks[0][1]
    (one_losses, one_states), *_ = vescale.emulate(lambda: on_one_device(name, steps), 1)
    pairs = [
        (one[key], state[key])
        for one, state in zip(one_states, states, strict=True)
        for key in one
    ]
    return {
        "model": name,
        "plan": AXES[name],
        "steps": steps,
        "losses": losses,
        "one_device": one_losses,
        "equal_bits": losses == one_losses and all(torch.equal(a, b) for a, b in pairs),
        "largest_loss_difference": max(
            abs(a - b) for a, b in zip(one_losses, losses, strict=True)
        ),
        "largest_parameter_difference": max(float((a - b).abs().max()) for a, b in pairs),
    }


# The picture.

_PANEL_WIDTH, _PANEL_HEIGHT, _LEFT, _TOP = 330, 190, 46, 34


def draw(found: list[dict[str, Any]]) -> str:
    """Return an SVG with a panel a model: one device's losses, and those of the ranks over it."""
    width, height = 2 * _PANEL_WIDTH + 40, (len(found) + 1) // 2 * (_PANEL_HEIGHT + 60)
    font = 'font-family="sans-serif" font-size="12" fill="#222"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for index, each in enumerate(found):
        x, y = index % 2 * (_PANEL_WIDTH + 20), index // 2 * (_PANEL_HEIGHT + 60)
        parts.append(f'<g transform="translate({x},{y})">{_panel(each)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(each: dict[str, Any]) -> str:
    highest = max(each["losses"] + each["one_device"])
    wide, high = _PANEL_WIDTH - _LEFT - 10, _PANEL_HEIGHT - _TOP

    def line(losses: Losses, style: str) -> str:
        points = " ".join(
            f"{_LEFT + wide * step / max(len(losses) - 1, 1):.1f},"
            f"{_TOP + high * (1 - loss / highest):.1f}"
            for step, loss in enumerate(losses)
        )
        return f'<polyline points="{points}" fill="none" {style}/>'

    says = (
        "all losses and parameters: the same bits"
        if each["equal_bits"]
        else f"losses differ by at most {each['largest_loss_difference']:.0e}"
    )
    legend = (
        '<tspan fill="#c98a12">one device</tspan> and '
        '<tspan fill="#1f4e8c">eight ranks</tspan> over it'
    )
    bottom, right = _TOP + high, _LEFT + wide
    return "".join(
        [
            f'<text x="{_LEFT}" y="14" font-weight="bold">{each["model"]}</text>',
            f'<text x="{_LEFT}" y="28" fill="#555">{each["plan"]}</text>',
            f'<path d="M{_LEFT},{_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>',
            f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{highest:.1f}</text>',
            f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
            f'<text x="{right}" y="{bottom + 15}" text-anchor="end">step {each["steps"]}</text>',
            line(each["one_device"], 'stroke="#f2b84b" stroke-width="7" stroke-linecap="round"'),
            line(each["losses"], 'stroke="#1f4e8c" stroke-width="1.5"'),
            f'<text x="{_LEFT + 60}" y="{_TOP + 16}">{legend}</text>',
            f'<text x="{_LEFT}" y="{bottom + 15}" fill="#555">{says}</text>',
        ]
    )


def main() -> None:
    """Train, print, and draw if all models were trained."""
    parser = argparse.ArgumentParser(description="Train in four dimensions and on one device.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--models", nargs="+", choices=list(PLANS), default=list(PLANS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = list[dict[str, Any]]()
    for name in given.models:
        found.append(compared(name, given.steps))
        print(json.dumps(found[-1]), flush=True)
    if given.models == list(PLANS):
        path = Path(__file__).parent / "concepts" / "four-dimensions.svg"
        path.write_text(draw(found), encoding="utf-8")


if __name__ == "__main__":
    main()

"""A HuggingFace T5, an encoder and a decoder, that learns to reverse its input."""

import torch
import torch.distributed as dist
from transformers import T5Config, T5ForConditionalGeneration

import vescale

CONFIG = T5Config(
    vocab_size=32, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]: of every configuration
)  # fmt: skip


def pairs() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(2, 32, (64, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.flip(0)} for row in tokens]


def main() -> None:
    torch.manual_seed(0)
    model = vescale.deferred_init(T5ForConditionalGeneration, CONFIG)
    # Of two stacks of blocks a pipeline would be refused; the planner chooses something else.
    plan = vescale.generate_plan(model, {"batch.global_size": 16})
    model, optimizer, loader = vescale.parallelize(
        plan, model, lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3), dataset=pairs()
    )
    for epoch in range(3):
        losses: list[float] = []
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    main()

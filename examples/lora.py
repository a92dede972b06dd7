"""LoRA with PEFT: adapters are trained, the base model is frozen and sharded all the same."""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import vescale

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    vocab_size=64,
)  # fmt: skip


def with_adapters() -> nn.Module:
    base = AutoModelForCausalLM.from_config(CONFIG)  # or from_pretrained
    return get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def main() -> None:
    rows = (torch.arange(64)[:, None] + torch.arange(16)) % 64
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    torch.manual_seed(0)
    model = with_adapters()
    plan = vescale.generate_plan(model, {"batch.global_size": 16})
    model, optimizer, loader = vescale.parallelize(
        plan,
        model,
        lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2),
        dataset=dataset,
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
    adapters = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
    vescale.save("adapters", {"model": adapters})  # small: only what was trained


if __name__ == "__main__":
    main()

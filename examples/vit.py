"""A HuggingFace vision transformer on images; its own class, its own forward."""

import torch
import torch.distributed as dist
from transformers import ViTConfig, ViTForImageClassification

import vescale

CONFIG = ViTConfig(
    image_size=32, patch_size=8, hidden_size=64, intermediate_size=128,
    num_hidden_layers=4, num_attention_heads=4,
    num_labels=4,  # pyright: ignore[reportCallIssue]: of every configuration
)  # fmt: skip


def images() -> list[dict[str, torch.Tensor]]:
    """Return noise with one bright quarter, and which."""
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, torch.Tensor]] = []
    for label in range(4):
        for noise in torch.randn(16, 3, 32, 32, generator=generator):
            top, left = 16 * (label // 2), 16 * (label % 2)
            noise[:, top : top + 16, left : left + 16] += 1
            found.append({"pixel_values": noise, "labels": torch.tensor(label)})
    return found


def main() -> None:
    torch.manual_seed(0)
    model = vescale.deferred_init(ViTForImageClassification, CONFIG)
    plan = vescale.generate_plan(model, {"batch.global_size": 16, "batch.shuffle": True})
    model, optimizer, loader = vescale.parallelize(
        plan, model, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), dataset=images()
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

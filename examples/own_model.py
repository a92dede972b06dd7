"""A hand-written decoder with rotary positions and grouped-query attention, on every rank."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale

VOCABULARY, WIDTH, HEADS, KV_HEADS, LENGTH = 64, 64, 4, 2, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_size = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, HEADS * self.head_size, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * self.head_size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, -1, self.head_size).transpose(1, 2)
        k, v = self.kv(x).view(rows, length, 2, -1, self.head_size).unbind(2)
        q, k = rotated(q, rotation), rotated(k.transpose(1, 2), rotation)
        y = nn.functional.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = rotation.cos(), rotation.sin()
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        positions = torch.arange(x.shape[1], device=x.device)
        frequencies = 1e4 ** -torch.arange(0, 1, 2 * HEADS / WIDTH, device=x.device)
        rotation = positions[:, None] * frequencies
        for block in self.blocks:
            x = block(x, rotation)
        return nn.functional.cross_entropy(self.head(self.norm(x)).mT, tokens[:, 1:])


def main() -> None:
    start, step = torch.arange(128)[:, None], 1 + torch.arange(128)[:, None] % 3
    dataset = (start + step * torch.arange(LENGTH)) % VOCABULARY
    torch.manual_seed(0)
    model = vescale.deferred_init(Decoder)
    plan = vescale.generate_plan(model, {"batch.global_size": 16}, example_batch=dataset[:8])
    model, optimizer, loader = vescale.parallelize(
        plan, model, lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3), dataset=dataset
    )
    for epoch in range(3):
        losses: list[float] = []
        for tokens in loader:
            loss = model(tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    main()

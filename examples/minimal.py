"""Train on any number of ranks; start it again and it continues where its checkpoint is."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale
import vescale_ckpt


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        blocks = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(4)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(32, 64)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["tokens"])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).mT, batch["targets"])


rows = (torch.arange(256)[:, None] + torch.arange(17)) % 64
dataset = [{"tokens": row[:-1], "targets": row[1:]} for row in rows]

torch.manual_seed(0)  # the same on every rank: the weights of one device
model = vescale.deferred_init(Net)  # no memory yet
plan = vescale.generate_plan(model, {"batch.global_size": 32, "batch.shuffle": True})
model, optimizer, scheduler, loader = vescale.parallelize(
    plan,
    model,
    lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32),
    dataset,
)
state = {"plan": plan, "model": model, "optimizer": optimizer, "scheduler": scheduler}
state |= {"loader": loader, "random": vescale_ckpt.RngState(), "epoch": 0}
if checkpoint := vescale_ckpt.latest("checkpoints"):
    state["epoch"] = vescale.load(checkpoint, state)["epoch"]  # saved under any plan
for epoch in range(state["epoch"], 4):
    for batch in loader:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    vescale.save(f"checkpoints/epoch-{epoch}", {**state, "epoch": epoch + 1}, keep_last=2)

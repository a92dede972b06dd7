"""Train on any number of ranks; started again, it resumes its checkpoint."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import vescale
import vescale_ckpt


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(32, 64)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["tokens"])
        causal = nn.Transformer.generate_square_subsequent_mask
        mask = causal(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).mT, batch["targets"])


rows = (torch.arange(256)[:, None] + torch.arange(17)) % 64
dataset = [{"tokens": row[:-1], "targets": row[1:]} for row in rows]

torch.manual_seed(0)  # the same on every rank: the weights of one device
model = vescale.deferred_init(Net)  # no memory yet
constraints = {"batch.global_size": 32, "batch.shuffle": True}
plan = vescale.generate_plan(model, constraints)
model, optimizer, scheduler, loader = vescale.parallelize(
    plan,
    model,
    lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    lambda optimizer: CosineAnnealingLR(optimizer, T_max=32),
    dataset,
)
state = {"plan": plan, "model": model, "optimizer": optimizer}
state |= {"scheduler": scheduler, "loader": loader, "epoch": 0}
state |= {"random": vescale_ckpt.RngState()}
first_epoch = 0
if checkpoint := vescale_ckpt.latest("checkpoints"):  # of any plan
    first_epoch = vescale.load(checkpoint, state)["epoch"]
for epoch in range(first_epoch, 4):
    losses: list[float] = []
    for batch in loader:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")
    state["epoch"] = epoch + 1
    vescale.save(f"checkpoints/epoch-{epoch}", state, keep_last=2)

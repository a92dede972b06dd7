"""Losses, and layers before a loss, in which the rows of a batch meet; each on a small network."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IN, WIDTH, OUT = 6, 8, 5
Batch = dict[str, Tensor]
Loss = Callable[["Net", Tensor, Batch], Tensor | dict[str, Tensor]]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A stem, two blocks and a head; what comes of their outputs is a named loss."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss
        self.stem = nn.Linear(IN, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, OUT)
        self.log_scale = nn.Parameter(torch.tensor(0.7))

    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        return LOSSES[self.loss](self, self.encode(batch["x"]), batch)


# Contrast within the batch


def _info_nce(net: Net, z: Tensor, batch: Batch) -> Tensor:
    a, b = F.normalize(z[:, 0], dim=-1), F.normalize(z[:, 1], dim=-1)
    logits = a @ b.T * net.log_scale.exp()
    targets = torch.arange(len(logits))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def _pairs_of_sigmoids(net: Net, z: Tensor, batch: Batch) -> Tensor:
    a, b = F.normalize(z[:, 0], dim=-1), F.normalize(z[:, 1], dim=-1)
    logits = a @ b.T * net.log_scale.exp()
    signs = 2 * torch.eye(len(logits)) - 1
    return -F.logsigmoid(signs * logits).sum(-1).mean()


def _triplet(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return F.triplet_margin_loss(z[:, 0], z[:, 1], z[:, 2].roll(1, 0))


def _hardest_triplet(net: Net, z: Tensor, batch: Batch) -> Tensor:
    distances = torch.cdist(z[:, 0], z[:, 0])
    same = batch["group"][:, None] == batch["group"][None]
    farthest = distances.masked_fill(~same, -1e9).amax(1)
    nearest = distances.masked_fill(same, 1e9).amin(1)
    return F.relu(farthest - nearest + 0.3).mean()


def _barlow_twins(net: Net, z: Tensor, batch: Batch) -> Tensor:
    a, b = ((v - v.mean(0)) / v.std(0) for v in (z[:, 0], z[:, 1]))
    correlation = a.T @ b / len(a)
    off = correlation - torch.eye(OUT)
    return off.diagonal().square().sum() + 0.1 * (off - off.diagonal().diag()).square().sum()


def _covariance(net: Net, z: Tensor, batch: Batch) -> Tensor:
    covariance = torch.cov(z[:, 0].T)
    return covariance.square().sum() - covariance.diagonal().square().sum()


def _cdist(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return (1 + torch.cdist(z[:, 0], z[:, 1])).log().mean()


def _ranking(net: Net, z: Tensor, batch: Batch) -> Tensor:
    score, value = z[:, 0, 0], batch["advantage"]
    gap = (score[:, None] - score[None]) * (value[:, None] - value[None]).sign()
    return F.softplus(-gap).mean()


def _prototypes(net: Net, z: Tensor, batch: Batch) -> Tensor:
    group = batch["group"]
    sums = torch.zeros(2, OUT).index_add(0, group, z[:, 0])
    means = sums / torch.bincount(group, minlength=2)[:, None].clamp(min=1)
    return F.cross_entropy(-torch.cdist(z[:, 0], means), group)


# Masks that count otherwise on every rank


def _nll(z: Tensor, batch: Batch) -> Tensor:
    return -z.log_softmax(-1).gather(-1, batch["target"][..., None])[..., 0]


def _masked_by_index(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return _nll(z, batch)[batch["mask"]].mean()


def _masked_select(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return _nll(z, batch).masked_select(batch["mask"]).mean()


def _masked_ratio(net: Net, z: Tensor, batch: Batch) -> Tensor:
    mask = batch["mask"].to(z.dtype)
    return (_nll(z, batch) * mask).sum() / mask.sum()


def _masked_elsewhere(net: Net, z: Tensor, batch: Batch) -> Tensor:
    mask = batch["late"].to(z.dtype)
    return (_nll(z, batch) * mask).sum() / mask.sum().clamp(min=1)


def _masked_elsewhere_by_index(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return _nll(z, batch)[batch["late"]].mean()


def _ignored_elsewhere(net: Net, z: Tensor, batch: Batch) -> Tensor:
    target = batch["target"].masked_fill(~batch["late"], -100)
    return F.cross_entropy(z.flatten(0, 1), target.flatten())


def _head_of_some(net: Net, z: Tensor, batch: Batch) -> Tensor:
    """Gives a module the rows that a mask picks: 4 of 8 at first, then 5."""
    picked = batch["score"] > 0
    z = z.clone()
    z[picked] = net.head(net.stem(batch["x"][picked]))
    return _mean(net, z, batch)


def _unreduced(net: Net, z: Tensor, batch: Batch) -> Tensor:
    losses = F.cross_entropy(z.flatten(0, 1), batch["target"].flatten(), reduction="none")
    return losses[batch["mask"].flatten()].mean()


def _unreduced_over_nonzero(net: Net, z: Tensor, batch: Batch) -> Tensor:
    target = batch["target"].masked_fill(~batch["mask"], -100).flatten()
    losses = F.cross_entropy(z.flatten(0, 1), target, reduction="none")
    return losses.sum() / (target != -100).sum()


def _nanmean(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return _nll(z, batch).masked_fill(~batch["mask"], float("nan")).nanmean()


def _mean_of_row_means(net: Net, z: Tensor, batch: Batch) -> Tensor:
    mask = batch["mask"].to(z.dtype)
    return ((_nll(z, batch) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def _weighted_rows(net: Net, z: Tensor, batch: Batch) -> Tensor:
    weight = batch["weight"]
    return (weight * _nll(z, batch).mean(1)).sum() / weight.sum()


def _smoothed(net: Net, z: Tensor, batch: Batch) -> Tensor:
    target = batch["target"].masked_fill(~batch["mask"], -100)
    return F.cross_entropy(z.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def _class_weights(net: Net, z: Tensor, batch: Batch) -> Tensor:
    target = batch["target"].masked_fill(~batch["mask"], -100)
    weight = torch.arange(1.0, OUT + 1)
    return F.cross_entropy(z.flatten(0, 1), target.flatten(), weight=weight)


def _focal(net: Net, z: Tensor, batch: Batch) -> Tensor:
    positive = batch["mask"].to(z.dtype)
    p = z[..., 0].sigmoid()
    loss = F.binary_cross_entropy_with_logits(z[..., 0], positive, reduction="none")
    return (loss * (p - positive).abs().square()).sum() / positive.sum().clamp(min=1)


def _dice(net: Net, z: Tensor, batch: Batch) -> Tensor:
    p, t = z[..., 0].sigmoid(), batch["mask"].to(z.dtype)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def _boxes(net: Net, z: Tensor, batch: Batch) -> Tensor:
    """DETR's kind: rows are matched alone, but all are divided by the boxes of the batch."""
    boxes, there = batch["y"][..., :OUT], batch["mask"]
    total = z.new_zeros(())
    for row, wanted, kept in zip(z, boxes, there, strict=True):
        cost = torch.cdist(wanted[kept], row, p=1)
        for index, costs in enumerate(cost):
            total = total + F.l1_loss(row[costs.argmin()], wanted[kept][index], reduction="sum")
    return total / max(int(there.sum()), 1)


# Reinforcement learning


def _policy_gradient(net: Net, z: Tensor, batch: Batch) -> Tensor:
    mask = batch["mask"]
    advantage = batch["advantage"][:, None].expand_as(mask)
    return (_nll(z, batch)[mask] * advantage[mask]).mean()


def _ppo(net: Net, z: Tensor, batch: Batch) -> Tensor:
    advantage = batch["advantage"]
    advantage = ((advantage - advantage.mean()) / (advantage.std() + 1e-8))[:, None]
    ratio = (-_nll(z, batch) + 1.6).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    mask = batch["mask"].to(z.dtype)
    return (loss * mask).sum() / mask.sum()


def _grpo(net: Net, z: Tensor, batch: Batch) -> Tensor:
    """Advantages within groups of samples, each group a row."""
    reward = batch["y"][..., 0]
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1)
    mask = batch["mask"].to(z.dtype)
    per_row = (_nll(z, batch) * advantage * mask).sum(1) / mask.sum(1).clamp(min=1)
    return per_row.mean()


# Sums, and what is no mean of rows


def _sum(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(z, batch["y"][..., :OUT], reduction="sum")


def _sum_of_tokens(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), batch["target"].flatten(), reduction="sum")


def _over_rows(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return (z - batch["y"][..., :OUT]).square().sum() / z.shape[0]


def _batchmean(net: Net, z: Tensor, batch: Batch) -> Tensor:
    target = batch["y"][..., :OUT].softmax(-1)
    return F.kl_div(z.log_softmax(-1), target, reduction="batchmean")


def _times_rows(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(z, batch["y"][..., :OUT]) * z.shape[0]


def _logsumexp(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return z[:, 0].logsumexp(0).mean() - z[:, 1].mean()


def _log_of_mean(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return z[:, 0, 0].exp().mean().log() - z[:, 1, 0].mean()


def _root_of_mean(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(z, batch["y"][..., :OUT]).sqrt()


def _perplexity(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), batch["target"].flatten()).exp()


def _product_of_means(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return z[..., 0].square().mean() * z[..., 1].square().mean()


def _norm(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return (z - batch["y"][..., :OUT]).norm()


def _topk(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return _nll(z, batch).mean(1).topk(3).values.mean()


def _maximum(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return z[:, 0].amax(0).mean() - z[:, 1].mean()


def _median(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return _nll(z, batch).mean(1).sort().values[2:].mean()


def _softmax_over_rows(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return (z[:, 0].softmax(0) * batch["y"][:, 0, :OUT]).mean()


def _entropy_of_mean(net: Net, z: Tensor, batch: Batch) -> Tensor:
    mean = z.softmax(-1).mean((0, 1))
    return (mean * mean.log()).sum() + _nll(z, batch).mean()


def _balanced_load(net: Net, z: Tensor, batch: Batch) -> Tensor:
    p = z.flatten(0, 1).softmax(-1)
    share = F.one_hot(p.argmax(-1), OUT).to(z.dtype).mean(0)
    return OUT * (share * p.mean(0)).sum() + _nll(z, batch).mean()


def _scaled_by_largest(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return (z / z.detach().abs().max() - batch["y"][..., :OUT]).square().mean()


# What layers do with the rows


def _centred(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return (z - z.mean(0)).tanh().square().mean()


def _spread_as_feature(net: Net, z: Tensor, batch: Batch) -> Tensor:
    spread = (z.var(0, unbiased=False) + 1e-5).sqrt().mean().expand(*z.shape[:2], 1)
    return torch.cat([z, spread], -1).tanh().square().mean()


def _mixed_up(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(0.7 * z + 0.3 * z.flip(0), batch["y"][..., :OUT])


def _running_sum(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return z.cumsum(0).tanh().mean()


def _number_of_row(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return (z * torch.arange(float(len(z)))[:, None, None]).tanh().mean()


def _attention_between_rows(net: Net, z: Tensor, batch: Batch) -> Tensor:
    x = z.transpose(0, 1)  # (time, rows, features): rows are what attends
    y = F.scaled_dot_product_attention(x, x, x).transpose(0, 1)
    return F.mse_loss(y, batch["y"][..., :OUT])


# Rows that do not meet


def _mean(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(z, batch["y"][..., :OUT])


def _tasks(net: Net, z: Tensor, batch: Batch) -> dict[str, Tensor]:
    target = batch["target"].masked_fill(~batch["mask"], -100).flatten()
    return {
        "tokens": F.cross_entropy(z.flatten(0, 1), target),
        "values": 0.3 * F.huber_loss(z[..., 0], batch["y"][..., 0]),
    }


def _weighted_tasks(net: Net, z: Tensor, batch: Batch) -> Tensor:
    tasks = _tasks(net, z, batch)
    precision = net.log_scale.exp()
    return tasks["tokens"] * precision + tasks["values"] / precision - net.log_scale


def _with_decay(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return _mean(net, z, batch) + 0.01 * sum(p.square().sum() for p in net.head.parameters())


def _ctc(net: Net, z: Tensor, batch: Batch) -> Tensor:
    rows, time = z.shape[:2]
    lengths = batch["mask"].sum(1).clamp(min=1)
    return F.ctc_loss(
        z.log_softmax(-1).transpose(0, 1), batch["target"][:, :2] % (OUT - 1) + 1,
        torch.full((rows,), time), lengths.clamp(max=2), zero_infinity=True,
    )  # fmt: skip


# Of the rows that are tried these take all, or by chance as many of each half


def _of_row(z: Tensor, batch: Batch) -> Tensor:
    return _nll(z, batch).mean(-1)


def _largest_few(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return _of_row(z, batch).sort(descending=True).values[:6].mean()


def _largest_at_most(net: Net, z: Tensor, batch: Batch) -> Tensor:
    each = _of_row(z, batch)
    return each.topk(min(6, len(each))).values.mean()


def _largest_behind_looks(net: Net, z: Tensor, batch: Batch) -> Tensor:
    """Looks at values first, at fewer of fewer rows, as loops over experts that were chosen do."""
    few = batch["target"].flatten()[1::3]
    for place in range(len(few)):
        assert int(few[place]) < OUT
    return _largest_at_most(net, z, batch)


def _largest_half(net: Net, z: Tensor, batch: Batch) -> Tensor:
    each = _of_row(z, batch)
    return each.sort(descending=True).values[: len(each) // 2].mean()


def _chosen_without_gradient(net: Net, z: Tensor, batch: Batch) -> Tensor:
    each = _of_row(z, batch)
    return each[each.detach().argsort()[-6:]].mean()


def _first_few(net: Net, z: Tensor, batch: Batch) -> Tensor:
    return _of_row(z, batch)[:6].mean()


def _decided_by_first(net: Net, z: Tensor, batch: Batch) -> Tensor:
    scale = 2.0 if int(batch["group"][0]) else 1.0
    return scale * F.cross_entropy(z.flatten(0, 1), batch["target"].flatten())


def _decided_by_each(net: Net, z: Tensor, batch: Batch) -> Tensor:
    scales = [2.0 if int(batch["group"][row]) else 1.0 for row in range(len(z))]
    return (z.square().mean((1, 2)) * torch.tensor(scales)).mean()


LOSSES: dict[str, Loss] = {
    "decided_by_first": _decided_by_first,
    "decided_by_each": _decided_by_each,
    "largest_few": _largest_few,
    "largest_at_most": _largest_at_most,
    "largest_behind_looks": _largest_behind_looks,
    "largest_half": _largest_half,
    "chosen_without_gradient": _chosen_without_gradient,
    "first_few": _first_few,
    "info_nce": _info_nce,
    "pairs_of_sigmoids": _pairs_of_sigmoids,
    "triplet": _triplet,
    "hardest_triplet": _hardest_triplet,
    "barlow_twins": _barlow_twins,
    "covariance": _covariance,
    "cdist": _cdist,
    "ranking": _ranking,
    "prototypes": _prototypes,
    "masked_by_index": _masked_by_index,
    "masked_select": _masked_select,
    "masked_ratio": _masked_ratio,
    "masked_elsewhere": _masked_elsewhere,
    "masked_elsewhere_by_index": _masked_elsewhere_by_index,
    "ignored_elsewhere": _ignored_elsewhere,
    "head_of_some": _head_of_some,
    "unreduced": _unreduced,
    "unreduced_over_nonzero": _unreduced_over_nonzero,
    "nanmean": _nanmean,
    "mean_of_row_means": _mean_of_row_means,
    "weighted_rows": _weighted_rows,
    "smoothed": _smoothed,
    "class_weights": _class_weights,
    "focal": _focal,
    "dice": _dice,
    "boxes": _boxes,
    "policy_gradient": _policy_gradient,
    "ppo": _ppo,
    "grpo": _grpo,
    "sum": _sum,
    "sum_of_tokens": _sum_of_tokens,
    "over_rows": _over_rows,
    "batchmean": _batchmean,
    "times_rows": _times_rows,
    "logsumexp": _logsumexp,
    "log_of_mean": _log_of_mean,
    "root_of_mean": _root_of_mean,
    "perplexity": _perplexity,
    "product_of_means": _product_of_means,
    "norm": _norm,
    "topk": _topk,
    "maximum": _maximum,
    "median": _median,
    "softmax_over_rows": _softmax_over_rows,
    "entropy_of_mean": _entropy_of_mean,
    "balanced_load": _balanced_load,
    "scaled_by_largest": _scaled_by_largest,
    "centred": _centred,
    "spread_as_feature": _spread_as_feature,
    "mixed_up": _mixed_up,
    "running_sum": _running_sum,
    "number_of_row": _number_of_row,
    "attention_between_rows": _attention_between_rows,
    "mean": _mean,
    "tasks": _tasks,
    "weighted_tasks": _weighted_tasks,
    "with_decay": _with_decay,
    "ctc": _ctc,
}
# A mean over equally many items of each row, or what vescale says that it counts: right, never
# refused.
ALONE = {
    "ignored_elsewhere", "mean_of_row_means", "smoothed", "class_weights", "grpo", "mean", "tasks",
    "weighted_tasks", "with_decay", "ctc", "decided_by_each",
}  # fmt: skip


def batches(rows: int, steps: int = 3, time: int = 4) -> list[Batch]:
    """Return batches whose masks count otherwise in every row; ``late`` only in the last rows."""
    generator = torch.Generator().manual_seed(5)
    found: list[Batch] = []
    number = torch.arange(rows, dtype=torch.float64)
    for step in range(steps):
        mask = (
            torch.rand(rows, time, generator=generator) < torch.linspace(0.3, 0.9, rows)[:, None]
        )
        mask[-1, 0] = True
        late = mask.clone()
        late[: rows // 2] = False
        found.append({
            "x": torch.randn(rows, time, IN, generator=generator, dtype=torch.float64),
            "y": torch.randn(rows, time, IN, generator=generator, dtype=torch.float64),
            "target": torch.randint(0, OUT, (rows, time), generator=generator),
            "mask": mask,
            "late": late,
            "weight": torch.rand(rows, generator=generator, dtype=torch.float64) + 0.1,
            "advantage": torch.randn(rows, generator=generator, dtype=torch.float64),
            "score": number - 2.5 if step else number % 2,
            "group": torch.randint(0, 2, (rows,), generator=generator),
        })  # fmt: skip
    return found

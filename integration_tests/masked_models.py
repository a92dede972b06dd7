"""Models whose forward looks at the values of a float mask, as torch's nn.Transformer does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

WIDTH, LENGTH, ROWS = 16, 6, 4

Batch = Mapping[str, Tensor]


class _Translates(nn.Module):
    """torch's encoder and decoder with dropout; where the mask comes from differs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, 4, 2, 2, 24, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def loss(self, x_BSF: Tensor, mask_SS: Tensor) -> Tensor:
        y_BSF = self.inner(x_BSF, x_BSF.flip(1), tgt_mask=mask_SS)
        return self.head(y_BSF).pow(2).mean()


class MakesItsMask(_Translates):
    """As torch's tutorials: in every forward."""

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"]
        return self.loss(
            x, nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        )


class KeepsItsMask(_Translates):
    """In a buffer, of which forward takes what it needs."""

    def __init__(self) -> None:
        super().__init__()
        mask_SS = torch.full((9, 9), -torch.inf).triu(1)
        self.mask_SS = nn.Buffer(mask_SS)

    def forward(self, batch: Batch) -> Tensor:
        x, length = batch["x"], batch["x"].shape[1]
        return self.loss(x, self.mask_SS[:length, :length])


class CachesItsMask(_Translates):
    """In an attribute, made anew when the length changes, as PyTorch's language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_SS: Tensor | None = None

    def forward(self, batch: Batch) -> Tensor:
        x, length = batch["x"], batch["x"].shape[1]
        if self.mask_SS is None or len(self.mask_SS) != length:
            self.mask_SS = torch.log(torch.tril(torch.ones(length, length, dtype=x.dtype)))
        return self.loss(x, self.mask_SS)


class WritesItsMask(_Translates):
    """In place, and through a view."""

    def forward(self, batch: Batch) -> Tensor:
        x, length = batch["x"], batch["x"].shape[1]
        mask_SS = x.new_zeros(length, length)
        mask_SS.masked_fill_(torch.ones_like(mask_SS).triu(1) > 0, -torch.inf)
        mask_SS.diagonal().add_(0.0)
        if not mask_SS[0, 1].isinf().item():
            raise ValueError("expected a causal mask")
        return self.loss(x, mask_SS)


class IsGivenItsMask(_Translates):
    """In the batch, a copy for every row."""

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(batch["x"], batch["mask"][0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (MakesItsMask, KeepsItsMask, CachesItsMask, WritesItsMask, IsGivenItsMask)
}


def build(name: str) -> nn.Module:
    return MODELS[name]()


def batches(name: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = [{"x": torch.randn(ROWS, LENGTH, WIDTH, generator=generator)} for _ in range(2)]
    if name == "IsGivenItsMask":
        mask_SS = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        found = [{**batch, "mask": mask_SS.expand(ROWS, -1, -1).clone()} for batch in found]
    return [{key: t.double() for key, t in batch.items()} for batch in found]

"""Programs of research code: solvers in backward, complex numbers, matching, tied lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import vescale

from .plans import make_plan
from .programs import WIDTH, Block, Run, rows, sgd

Batch = dict[str, Tensor]


class Adjoint(torch.autograd.Function):
    """Euler steps whose backward runs the function anew, as torchdiffeq's adjoint method."""

    @staticmethod
    def forward(ctx: Any, func: Any, x: Tensor, *params: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            y = x + 0.5 * func(x)
        ctx.func = func
        ctx.save_for_backward(x, *params)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + 0.5 * ctx.func(x)
            by_x, *by_params = torch.autograd.grad(y, (x, *params), grad, allow_unused=True)
        return None, by_x, *by_params


class Ode(nn.Module):
    """An ordinary differential equation, integrated around blocks or within one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = Adjoint.apply(block, x, *block.parameters())
        return F.mse_loss(x, batch["y"])  # pyright: ignore[reportArgumentType]: torch's own stub


def integrated(run: Run) -> None:
    run.train(Ode())


class Equilibrium(nn.Module):
    """A fixed point, differentiated by a solver in a hook of the gradient (DEQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        with torch.no_grad():
            for parameter in self.inner.parameters():
                parameter.mul_(0.4)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return self.inner(torch.cat([z, x], -1))

    def forward(self, batch: Batch) -> Tensor:
        x = self.up(batch["x"])
        with torch.no_grad():
            z = solved(lambda z: self.step(z, x), torch.zeros_like(x))
        z = self.step(z, x)
        start = z.clone().detach().requires_grad_()
        made = self.step(start, x)

        def solve(grad: Tensor) -> Tensor:
            def once(value: Tensor) -> Tensor:
                return torch.autograd.grad(made, start, value, retain_graph=True)[0] + grad

            return solved(once, grad)

        if z.requires_grad:
            z.register_hook(solve)
        return F.mse_loss(z, batch["y"])


def solved(step: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    for _ in range(5):
        value = step(value)
    return value


def equilibrium(run: Run) -> None:
    run.train(Equilibrium())


class Spectral(nn.Module):
    """A layer with complex weights between real or complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / WIDTH)

    def forward(self, z: Tensor) -> Tensor:
        return z + torch.fft.ifft(torch.fft.fft(z) @ self.weight)


class Waves(nn.Module):
    """Blocks that hand complex numbers on, and a norm over the batch between them if so asked."""

    def __init__(self, *, is_normed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Spectral() for _ in range(4))
        self.is_normed = is_normed

    def forward(self, batch: Batch) -> Tensor:
        z = torch.complex(batch["x"], batch["y"])
        for block in self.blocks:
            z = block(z)
            if self.is_normed:
                z = z / (z.abs().square().mean(0, keepdim=True) + 0.1).sqrt()
        return (z - batch["y"]).abs().square().mean()


def waves(run: Run) -> None:
    run.train(Waves(is_normed=False))


def waves_with_norm(run: Run) -> None:
    run.train(Waves(is_normed=True))


class Points(nn.Module):
    """Batch norm of what lies around points, which is one and the same if nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self.move, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.move.weight.mul_(1e-4)

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"]
        near = torch.where(self.move(x).abs() < 1e-3, x, torch.zeros_like(x))
        return F.mse_loss(self.head(self.norm(self.up(near)).relu()), batch["y"])


def points(run: Run) -> None:
    model = Points()
    with torch.no_grad():
        model.move.bias.zero_()
    run.train(model)


class Matching(nn.Module):
    """Queries repeated for every row, and a solver of NumPy that gives them targets (DETR)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, WIDTH))
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: Batch) -> Tensor:
        keys = batch["x"].unsqueeze(-1).expand(-1, -1, WIDTH)
        queries = self.queries.unsqueeze(0).repeat(len(keys), 1, 1)
        found = self.head(self.attend(queries, keys, keys)[0]).squeeze(-1)  # (rows, 3)
        wanted = batch["y"][:, :3]
        with torch.no_grad():
            costs = (found.unsqueeze(-1) - wanted.unsqueeze(1)).abs()
        order = torch.stack([torch.as_tensor(assignment(cost.numpy())) for cost in costs])
        is_near = (wanted.abs() < 1).to(found.dtype)  # of another number in every row
        return ((found - wanted.gather(1, order)).abs() * is_near).sum() / is_near.sum()


def assignment(cost: Any) -> Any:
    """Return what linear_sum_assignment of SciPy does."""
    size = len(cost)
    sums = {each: cost[range(size), each].sum() for each in itertools.permutations(range(size))}
    return np.array(min(sums, key=lambda each: sums[each]))


def matched(run: Run) -> None:
    run.train(Matching())


class Detector(nn.Module):
    """Targets of all rows in one table, with the number of the row in each (YOLO)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        found = self.norm(self.up(x))
        row, place = targets[:, 0].long(), targets[:, 1].long()
        return F.mse_loss(found[row, place], targets[:, 2])


def detected(run: Run) -> None:
    model, optimizer = run.start(Detector())
    for batch in rows():
        x = run.part(batch)["x"]
        row = torch.tensor([0, 2, 3])
        targets = torch.stack([row.double(), 2.0 * row, x[row, 0]], 1)
        model(x, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


class Tied(nn.Module):
    """Lists of lists that hold the same two modules, as the Perceiver of lucidrains."""

    def __init__(self) -> None:
        super().__init__()
        first, second = Block(), Block()
        self.layers = nn.ModuleList(nn.ModuleList([first, second]) for _ in range(3))

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            for block in layer:
                x = block(x)
        return F.mse_loss(x, batch["y"])


def tied_lists(run: Run) -> None:
    _train_planned(run, Tied().double())


def _train_planned(run: Run, model: Any) -> None:
    """Train under a plan that is made for the model."""
    batches = rows()
    optimizer = sgd(model)
    if run.constraints is not None:
        plan = vescale.generate_plan(model, run.constraints, example_batch=batches[0])
        model, optimizer = vescale.parallelize(plan, model, sgd)
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


class StateSpace(nn.Module):
    """A convolution whose kernel is made of an index on the processor (S4D)."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(WIDTH, 2) / 4)
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rates = torch.complex(-self.decay.exp(), self.decay)
        kernel = torch.exp(rates.unsqueeze(-1) * torch.arange(WIDTH))
        scaled = torch.view_as_complex(self.pairs).unsqueeze(-1) * kernel
        return x + x @ scaled.real


class StateSpaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StateSpace() for _ in range(4))

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, batch["y"])


def state_spaces(run: Run) -> None:
    run.train(StateSpaces())


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A chosen and a rejected answer."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        batch = rows(1)[0]
        return batch["x"][index], batch["y"][index]


def chosen_then_rejected(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.cat([torch.stack(each) for each in zip(*pairs, strict=True)])


class Reward(nn.Module):
    """Compares the first half of its rows with the second, as DeepSpeed-Chat's reward model."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen, rejected = self.score(x).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()


def rewarded(run: Run) -> None:
    model, loader = Reward().double(), DataLoader(Pairs(), 4, collate_fn=chosen_then_rejected)
    optimizer: Any = sgd(model)
    if run.constraints is not None:
        plan = make_plan(run.constraints)
        model, optimizer, loader = vescale.parallelize(plan, model, sgd, dataset=loader)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


class Spoken(nn.Module):
    """A loss over alignments (CTC) behind a layer with dropout that ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, WIDTH))
            for _ in range(2)
        )

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch["x"].unsqueeze(-1))
        for block in self.blocks:
            x = x + block(x)
        targets = batch["y"][:, :3].abs().long() + 1
        lengths = torch.full((len(x),), WIDTH)
        scores = x.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, lengths, torch.full((len(x),), 3))


def spoken(run: Run) -> None:
    _train_planned(run, Spoken().double())


class OneByOne(nn.Module):
    """Hands its losses out one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> Iterator[Tensor]:
        made = self.head(batch["x"])
        return (F.mse_loss(made, wanted) for wanted in (batch["y"], batch["x"]))


def one_by_one(run: Run) -> None:
    model, _ = run.start(OneByOne())
    for batch in rows():
        first, second = model(run.part(batch))
        (first + second).backward()

"""What people do with a model besides calling it, each a program for every plan."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import vescale

from .habits_of_loops import loop
from .plans import DP, make_plan
from .programs import WIDTH, Plain, Run, rows

# The model


def trained_by_a_method(run: Run) -> None:
    """Trains by another method than forward."""
    model, optimizer = run.start(Plain())
    for batch in rows(2):
        part = run.part(batch)
        loss = F.mse_loss(model.logits(part), part["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def adapted_later(run: Run) -> None:
    model, _ = run.start(Plain())
    model.blocks[1].adapter = nn.Linear(WIDTH, WIDTH).double()
    model(run.part(rows(1)[0])).backward()
    raise ValueError("nobody said so")


def forward_directly(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(2):
        loss = model.forward(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def ddp_after(run: Run) -> None:
    model, optimizer = run.start(Plain())
    wrapped = model if run.constraints is None else DistributedDataParallel(model)
    loop(run, wrapped, optimizer)


def ddp_before(run: Run) -> None:
    plain: Any = Plain().double()
    if run.constraints is not None:
        vescale.parallelize(make_plan({DP: 2}), nn.Linear(2, 2))  # starts the process group
        plain = DistributedDataParallel(plain)
    model, optimizer = run.start(plain)
    loop(run, model, optimizer)


def data_parallel_module(run: Run) -> None:
    model, optimizer = run.start(Plain())
    loop(run, nn.DataParallel(model), optimizer)


def moved(run: Run) -> None:
    """Converts to what it is already."""
    model, optimizer = run.start(Plain())
    model.double().to("cpu").to(torch.float64).cpu().train()
    loop(run, model, optimizer)


def halved(run: Run) -> None:
    model, optimizer = run.start(Plain())
    model.half()
    loop(run, model, optimizer)


def applied(run: Run) -> None:
    """Initializes its weights anew."""
    model, optimizer = run.start(Plain())

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 0.25)
            module.weight.data.mul_(0.5)

    model.apply(init)
    loop(run, model, optimizer)


def random_init(run: Run) -> None:
    model, optimizer = run.start(Plain())
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    loop(run, model, optimizer)


def edited(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.head.weight.mul_(0.9)
            model.blocks[2].up.weight.clamp_(-0.1, 0.1)
            model.embed.weight[0].zero_()
            model.embed.bias.copy_(torch.arange(WIDTH).double())
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def tied_later(run: Run) -> None:
    model, optimizer = run.start(Plain())
    model.head.weight = model.embed.weight
    loop(run, model, optimizer)


def tied_before(run: Run) -> None:
    plain = Plain()
    plain.head.weight = plain.embed.weight
    model, optimizer = run.start(plain)
    loop(run, model, optimizer)


def added_later(run: Run) -> None:
    model, _ = run.start(Plain())
    torch.manual_seed(3)
    model.head = nn.Linear(WIDTH, WIDTH).double()
    optimizer = SGD(model.parameters(), 0.1)
    loop(run, model, optimizer)


def averaged_before(run: Run) -> None:
    plain = Plain().double()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model, optimizer = run.start(plain)
    for batch in rows(3):
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    run.finish(average)


def average_by_hand(run: Run) -> None:
    model, optimizer = run.start(Plain())
    average = [p.detach().clone() for p in model.parameters()]
    for batch in rows(3):
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    for mean in average:
        run.keep(mean)


def average_swapped_in(run: Run) -> None:
    model, optimizer = run.start(Plain())
    average = {k: v.clone() for k, v in model.state_dict().items()}
    for batch in rows(3):
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for key, value in model.state_dict().items():
            average[key].lerp_(value, 0.5)
    held = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(average)
    with torch.no_grad():
        run.keep(model(run.part(rows(1)[0])))
    model.load_state_dict(held)
    loop(run, model, optimizer)


def copied(run: Run) -> None:
    model, _ = run.start(Plain())
    model.eval()
    other = copy.deepcopy(model)
    assert not other.training
    loop(run, other.train(), SGD(other.parameters(), 0.1))
    run.finish(other)
    run.finish(model)


class Recurrent(nn.Module):
    """Its LSTM keeps its parameters in a list of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, num_layers=2)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        y, _ = self.lstm(batch["x"].unsqueeze(1))
        return F.mse_loss(self.head(y.squeeze(1)), batch["y"])


def normed_by_hooks(run: Run) -> None:
    """Weights that a hook computes of parameters, and keeps with their graph until it does so."""
    plain = Plain().double()
    weight_norm: Any = getattr(nn.utils, "weight_norm", None)  # deprecated, and in many vocoders
    spectral_norm: Any = getattr(nn.utils, "spectral_norm", None)
    weight_norm(plain.blocks[1].up)
    spectral_norm(plain.blocks[2].down)
    model, optimizer = run.start(plain)
    loop(run, model, optimizer)


class WithoutElements(nn.Module):
    """A model with parameters that have no elements: slots for what a configuration leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Plain()
        self.slots = nn.Parameter(torch.zeros(0, 4))
        self.more = nn.ParameterList([nn.Parameter(torch.zeros(4, 0))])

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = self.body(batch)
        return loss + self.slots.sum() + self.more[0].sum()


def without_elements(run: Run) -> None:
    model, optimizer = run.start(WithoutElements().double())
    loop(run, model, optimizer)


def recurrent(run: Run) -> None:
    model, optimizer = run.start(Recurrent())
    loop(run, model, optimizer)


class Paired(nn.Module):
    """Layers in lists of lists and in dicts, which nothing calls, as vit-pytorch has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(2)
        )
        self.named = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, 16), "down": nn.Linear(16, WIDTH)})
            for _ in range(2)
        )

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["x"]
        for norm, linear in self.layers:  # pyright: ignore[reportGeneralTypeIssues]: a list
            x = x + linear(norm(x))
        for pair in self.named:
            assert isinstance(pair, nn.ModuleDict)
            x = x + pair["down"](pair["up"](x).tanh())
        return F.mse_loss(x, batch["y"])


def paired(run: Run) -> None:
    run.train(Paired())


class Listed(nn.Module):
    """Keeps parameters where torch does not see them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.pair = [self.first.weight, self.second.weight]

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = F.linear(batch["x"], self.pair[0]).tanh()
        return F.mse_loss(self.second(x), batch["y"]) + 0 * self.first(x).mean()


def listed(run: Run) -> None:
    model, optimizer = run.start(Listed())
    loop(run, model, optimizer)


class InPlace(nn.Module):
    """A block that begins and ends by writing to what it is given, to save memory."""

    def __init__(self, *norm: nn.Module) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), *norm)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        y = self.down(self.relu(self.up(x)))
        y += x
        return y


def written_in_place(run: Run) -> None:
    model = Plain()
    model.blocks = nn.ModuleList(InPlace() for _ in range(4))
    run.train(model)


def normalized_and_written_in_place(run: Run) -> None:
    """As in ResNets and U-Nets: batch norm, and an activation that writes to its result."""
    model = Plain()
    model.blocks = nn.ModuleList(InPlace(nn.BatchNorm1d(2 * WIDTH)) for _ in range(2))
    run.train(model)
    for buffer in model.buffers():
        run.keep(buffer)

"""Silent bugs of training stacks, planted into this one after it has checked itself.

Those of a kind that was reported for another stack say where. They begin behind the first step
of the optimizer, when all that is compared on a first call has been compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import vescale
from vescale_dtensor import DTensor
from vescale_parallel._cross_replica.borders import NOWHERE
from vescale_parallel._cross_replica.context import conversions
from vescale_parallel._cross_replica.context.sliced.tensor import Along, SumOverSlices
from vescale_parallel._cross_replica.regions.row_regions import RowRegions
from vescale_parallel._data_parallel import gradient_rows
from vescale_parallel._data_parallel.gathered_once import GatheredOnce
from vescale_parallel._data_parallel.gradient_rows import GradientRows
from vescale_parallel._data_parallel.param_group import ParamGroup
from vescale_parallel._expert_parallel import dispatch
from vescale_parallel._loss.token_mean import TokenMeans
from vescale_parallel._pipeline import runner, tied_weights
from vescale_parallel._pipeline.execution.links import Links
from vescale_parallel._rng import part_of_whole
from vescale_parallel._tensor_parallel.communicators import ProcessRanks
from vescale_parallel._tensor_parallel.conversions import Boundary

from .experts import build as moe
from .families import CONFIGS, hugging_face
from .plans import CP, DP, EP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints, make_plan

# Models, each with its batch.


class Blocks(nn.Module):
    """Token embeddings, blocks of a norm and two linear layers with dropout, a head."""

    def __init__(self, *, drops: float = 0.0, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16),
                nn.Dropout(drops),
            )
            for _ in range(4)
        )  # fmt: skip
        self.head = nn.Linear(16, 24, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Normalized(nn.Module):
    """A batch norm between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 10), nn.BatchNorm1d(10)
        self.last = nn.Linear(10, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.norm(self.first(x)).relu()), y)


def _tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 24, (8, 6), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, :4], labels[5, 4:] = -100, -100
    return {"input_ids": ids, "labels": labels}


def _points() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"x": torch.randn(8, 6, generator=generator), "y": torch.arange(8) % 4}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "blocks": (Blocks, _tokens),
    "tied": (lambda: Blocks(is_tied=True), _tokens),
    "dropout": (lambda: Blocks(drops=0.3), _tokens),
    "batch norm": (Normalized, _points),
    "llama": (lambda: hugging_face("llama", "sdpa", **CONFIGS["llama"]), _tokens),
    "mixtral": (lambda: moe("mixtral"), _tokens),
}

Patch = Callable[[ExitStack], None]


@dataclass(frozen=True, kw_only=True)
class Bug:
    """Something wrong with a parallel training step that no exception tells of.

    Attributes:
        model: A key of ``MODELS``.
        plan: Under which it shows.
        plant: Puts it in.
        what: Of the first divergence.
        name: A part of the name of the first divergence.
        partial: The module whose output ranks still hold as terms of a sum.
        level: The level that fails.
        clips: Whether gradients are clipped.
        is_behind_backward: Whether it is in what ranks compute alone behind backward. It is put in
            when all have made their first step; others when the first one has, for all at once.
        source: Where one of its kind was reported, empty if it was made up.
    """

    model: str
    plan: Constraints
    plant: Patch
    what: str
    name: str = ""
    partial: str = ""
    level: str = "N4"
    clips: bool = False
    is_behind_backward: bool = False
    source: str = ""


def replaced(owner: Any, name: str, wrong: Callable[..., Any]) -> Patch:
    """Put ``wrong(right, *args, **kwargs)`` in the place of a function or method."""

    def plant(stack: ExitStack) -> None:
        right = getattr(owner, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrong(right, *args, **kwargs)

        stack.enter_context(mock.patch.object(owner, name, replacement))

    return plant


def is_in_backward() -> bool:
    """Whether autograd runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def _no_sum_in_forward(right: Any, ranks: ProcessRanks, x: Tensor) -> Tensor:
    return right(ranks, x) if is_in_backward() else x.clone()


def _no_sum_in_backward(right: Any, ranks: ProcessRanks, x: Tensor) -> Tensor:
    return x.clone() if is_in_backward() else right(ranks, x)


def _twice(right: Any, *args: Any, **kwargs: Any) -> Any:
    return right(*args, **kwargs) * 2


def _nothing(right: Any, *args: Any, **kwargs: Any) -> None:
    return None


def _local_count(right: Any, means: TokenMeans, counted: Tensor, local: Tensor) -> Tensor:
    mean = local / counted.to(local.dtype)
    means.means.append(mean)
    return mean


def _reversed_sum(right: Any, rows: Tensor, *, out: Tensor) -> Tensor:
    return right(rows.flip(0), out=out)


def _rounded_sum(right: Any, rows: Tensor, *, out: Tensor) -> Tensor:
    return right(rows.bfloat16().to(rows.dtype), out=out)


def _without_own(right: Any, rows: Tensor, *, out: Tensor) -> Tensor:
    return right(rows[1:].clone(), out=out)


def _detached_weights(
    right: Any, rows: Tensor, index: Tensor, weights: Tensor, how: Any
) -> Tensor:
    return right(rows, index, weights.detach(), how)


def _equal_weights(right: Any, rows: Tensor, index: Tensor, weights: Tensor, how: Any) -> Tensor:
    return right(rows, index, torch.ones_like(weights) / weights.shape[-1], how)


def _dropped(right: Any, rows: Tensor, index: Tensor, weights: Tensor, how: Any) -> Tensor:
    return right(rows * (index != 0)[..., None], index, weights, how)


def _not_coupled(right: Any, regions: RowRegions, coupling: Any, num_rows: int) -> Any:
    return right(regions, NOWHERE, num_rows)


def _not_exchanged(right: Any, *args: Any, **kwargs: Any) -> Any:
    yield from ()


def _fewer_digits(right: Any, *args: Any) -> Tensor:
    received = right(*args)
    return received.bfloat16().to(received.dtype)


def _only_own(right: Any, tensor: nn.Parameter, *others: Any) -> None:
    own = None if tensor.grad is None else tensor.grad.clone()
    right(tensor, *others)
    tensor.grad = None if tensor.grad is None else own


def _labels_of_first(right: Any, *args: Any, **kwargs: Any) -> Any:
    parts = right(*args, **kwargs)
    first = parts[0][1]
    return [(a, {**k, "labels": first["labels"]} if "labels" in k else k) for a, k in parts]


def _own_mask(right: Any, *args: Any, **kwargs: Any) -> Any:
    torch.rand(1 + dist.get_rank())
    return right(*args, **kwargs)


def _local_norm(right: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return right(local, *args, **kwargs)


def _slice_of_other(right: Any, x: Tensor, dim: int, slices: Any, ranks: Any) -> Tensor:
    return slices.part(x, dim, ranks.size - 1 - ranks.rank).contiguous()


def _targets_before(right: Any, along: Along, x: Tensor, dim: int) -> Tensor:
    return right(along, x.roll(1, dim), dim)


def _gradient_of_part(right: Any, ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


def _half_gradient(right: Any, x: Tensor, *args: Any) -> Tensor:
    return right(x, *args) / (2 if is_in_backward() else 1)


TP2: Mapping[str, Any] = {TP: 2}
DP2: Mapping[str, Any] = {DP: 2}
DP4: Mapping[str, Any] = {DP: 4, ZERO: 2}
ZERO3: Mapping[str, Any] = {DP: 2, ZERO: 3}
PP2: Mapping[str, Any] = {PP: 2, PARTS: 2}
EP2: Mapping[str, Any] = {DP: 2, EP: 2}
CP2: Mapping[str, Any] = {CP: 2}

BUGS: dict[str, Bug] = {
    "a row-wise layer is not summed over ranks": Bug(
        source="NVIDIA/Megatron-LM#7452, sums over TP that are missing",
        model="blocks",
        plan=TP2,
        plant=replaced(ProcessRanks, "all_reduce", _no_sum_in_forward),
        what="activation",
        name="blocks.0.0",
        partial="embed",
    ),
    "the gradient of what enters a column-wise layer is not summed": Bug(
        source="NVIDIA/Megatron-LM#7452, number 11",
        model="blocks",
        plan=TP2,
        plant=replaced(ProcessRanks, "all_reduce", _no_sum_in_backward),
        what="gradient",
    ),
    "gradients are summed over tensor-parallel ranks twice": Bug(
        model="blocks",
        plan=TP2,
        plant=replaced(ProcessRanks, "all_reduce", _twice),
        what="activation",
    ),
    "sequence-parallel activations are not summed": Bug(
        model="llama",
        plan={TP: 2, SEQUENCE: True},
        plant=replaced(ProcessRanks, "reduce_scatter", _twice),
        what="activation",
    ),
    "losses are divided by the targets of a rank": Bug(
        source="pytorch/torchtitan#1842",
        model="blocks",
        plan=DP2,
        plant=replaced(TokenMeans, "_mean", _local_count),
        what="loss",
    ),
    "gradients of ranks are added in another order": Bug(
        model="blocks",
        plan=DP4,
        plant=replaced(gradient_rows, "ordered_sum", _reversed_sum),
        what="gradient",
        level="N3",
    ),
    "gradients are reduced in fewer digits": Bug(
        model="blocks",
        plan=DP4,
        plant=replaced(gradient_rows, "ordered_sum", _rounded_sum),
        what="gradient",
    ),
    "a rank's gradient is left out": Bug(
        model="blocks",
        plan=DP4,
        plant=replaced(gradient_rows, "ordered_sum", _without_own),
        what="gradient",
    ),
    "gradients are summed where they should be averaged": Bug(
        source="NVIDIA/Megatron-LM#906",
        model="blocks",
        plan=ZERO3,
        plant=replaced(GradientRows, "_kept", _twice),
        what="gradient",
    ),
    "gathered parameters are those of the step before": Bug(
        model="blocks",
        plan={DP: 2, ZERO: 1},
        plant=replaced(GatheredOnce, "gather", _nothing),
        what="activation",
        name="embed",
    ),
    "batch norm normalizes over a rank's rows": Bug(
        model="batch norm",
        plan=DP2,
        plant=replaced(RowRegions, "of_call", _not_coupled),
        what="activation",
        name="norm",
    ),
    "micro-batches get the labels of the first": Bug(
        model="blocks",
        plan=PP2,
        plant=replaced(runner, "split_batch", _labels_of_first),
        what="loss",
    ),
    "a tied weight has the gradient of one stage": Bug(
        source="uw-syfi/piper#13",
        model="tied",
        plan=PP2,
        plant=replaced(tied_weights, "_return_gradient", _only_own),
        what="gradient",
        name="embed.weight",
    ),
    "tied weights of two stages drift apart": Bug(
        source="NVIDIA/Megatron-LM#299",
        model="tied",
        plan=PP2,
        plant=replaced(tied_weights, "_move", _nothing),
        what="activation",
        name="head",
    ),
    "ranks draw masks of their own": Bug(
        source="NVIDIA/Megatron-LM#206",
        model="dropout",
        plan=DP2,
        plant=replaced(part_of_whole, "draw_part", _own_mask),
        what="activation",
        name="blocks.0.4",
    ),
    "scores of the router get no gradient": Bug(
        source="huggingface/transformers#48687",
        model="mixtral",
        plan=EP2,
        plant=replaced(dispatch, "combined", _detached_weights),
        what="gradient",
        name="gate",
    ),
    "experts are added up without their scores": Bug(
        model="mixtral",
        plan=EP2,
        plant=replaced(dispatch, "combined", _equal_weights),
        what="activation",
        name="experts",
    ),
    "the gradient of a slice is that of another": Bug(
        model="llama",
        # Of a head on slices nothing goes back from whole sequences.
        plan={**CP2, "context_parallel.outputs": "whole"},
        plant=replaced(conversions, "keep_slice", _slice_of_other),
        what="gradient",
    ),
    "a head on slices is given the targets of positions before": Bug(
        model="llama",
        plan=CP2,
        plant=replaced(Along, "part", _targets_before),
        what="loss",
    ),
    "gradients of a loss over slices are averaged like those of a batch": Bug(
        model="llama",
        plan=CP2,
        plant=replaced(SumOverSlices, "backward", _gradient_of_part),
        what="gradient",
    ),
    "attention's gradients are off by the number of ranks": Bug(
        source="NVIDIA/Megatron-LM#1464",
        model="llama",
        plan=CP2,
        plant=replaced(conversions, "_send_slices", _half_gradient),
        what="gradient",
    ),
    "what a region computes counts twice": Bug(
        model="llama",
        plan={TP: 2, SEQUENCE: True},
        plant=replaced(Boundary, "leave", _twice),
        what="activation",
        name="embed_tokens",
    ),
    "gradients of norms are those of a rank's part of the sequence": Bug(
        source="NVIDIA/Megatron-LM#1446",
        model="llama",
        plan={TP: 2, SEQUENCE: True},
        plant=replaced(ParamGroup, "sum_copies", _nothing),
        what="gradient",
        name="norm",
    ),
    "copies of a model do not exchange gradients": Bug(
        source="huggingface/transformers#48205",
        model="blocks",
        plan={DP: 4},
        plant=replaced(GradientRows, "_all_reduce", _not_exchanged),
        what="gradient",
    ),
    "tokens beyond the capacity of an expert are dropped": Bug(
        model="mixtral",
        plan=EP2,
        plant=replaced(dispatch, "combined", _dropped),
        what="activation",
        name="experts",
    ),
    "activations are sent in fewer digits": Bug(
        model="blocks",
        plan=PP2,
        plant=replaced(Links, "_wait", _fewer_digits),
        what="activation",
        name="blocks.2.0",
    ),
    "gradients are clipped by the norm of a shard": Bug(
        source="pytorch/pytorch#170862",
        model="blocks",
        plan=ZERO3,
        plant=replaced(torch.nn.utils.clip_grad, "_get_total_norm", _local_norm),
        what="norm of gradients",
        clips=True,
    ),
}


@contextmanager
def planted(bug: Bug) -> Iterator[tuple[Callable[[], nn.Module], Callable[..., Optimizer]]]:
    """Make the model, and an optimizer whose first step of a run puts the bug in."""
    build, _ = MODELS[bug.model]
    stack, num_steps = ExitStack(), [0]

    def model_fn() -> nn.Module:
        stack.close()
        num_steps[0] = 0
        return build()

    def put_in(*_: object) -> None:
        if dist.is_initialized():
            num_steps[0] += 1
            if num_steps[0] == (dist.get_world_size() if bug.is_behind_backward else 1):
                bug.plant(stack)

    def optimizer_fn(model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(put_in)
        return optimizer

    with stack:
        yield model_fn, optimizer_fn


def found(bug: Bug) -> vescale.VerifyReport:
    """Verify the plan of a bug with the bug in it."""
    with planted(bug) as (model_fn, optimizer_fn):
        return vescale.verify(
            make_plan(bug.plan),
            model_fn,
            MODELS[bug.model][1](),
            steps=2,
            optimizer_fn=optimizer_fn,
            max_grad_norm=0.1 if bug.clips else None,
        )

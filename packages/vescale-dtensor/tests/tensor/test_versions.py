"""Writes are counted, those to lists of tensors, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import distribute_tensor, emulate


def _adamw(weight: Any) -> None:
    states = [[weight.detach().clone()] for _ in range(3)]
    fused: Any = torch.ops.aten._fused_adamw_.default
    fused(
        [weight], *states, [], [torch.tensor(1.0)], lr=0.1, beta1=0.9, beta2=0.9,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


WRITES: dict[str, Callable[[Any], object]] = {
    "one tensor": lambda weight: weight.mul_(2),
    "out": lambda weight: torch.mul(weight, 2, out=weight),
    "a list": lambda weight: torch._foreach_mul_([weight], 2),  # pyright: ignore[reportPrivateImportUsage]
    "a list from another": lambda weight: torch._foreach_copy_([weight], [weight * 2]),  # pyright: ignore[reportPrivateImportUsage]
    "lists": _adamw,
}


@pytest.mark.filterwarnings("ignore:.*gathered")
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_counted(write: str, placement: Placement) -> None:
    with emulate(2):
        weight: Any = distribute_tensor(
            torch.ones(4, 3), init_device_mesh("cpu", (2,)), (placement,)
        )
        for _ in range(2):  # the plan of the first call serves the second
            before = weight._version
            with torch.no_grad():
                WRITES[write](weight)
            assert weight._version > before

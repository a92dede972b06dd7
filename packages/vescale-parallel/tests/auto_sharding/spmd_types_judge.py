"""spmd_types as a judge: the types of all tensors of one rank's forward.

It is a checker that others wrote (https://github.com/meta-pytorch/spmd_types, local types). By
axis of the mesh a tensor is the same on all ranks, with gradients that are the same (invariant,
I) or partial values (replicate, R), or it differs (varying, V), or is itself a partial value (P).
Operators that mix them wrongly are errors: a whole parameter that meets a rank's heads, of which
nobody sums the gradient; an activation that enters a region without a sum in backward.

Here are only the types of what a sharding plan is about: parameters, and activations that cross
the border of a region. The rest, and what is an error, is the judge's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_parallel._model.linear_layout import LinearKind
from vescale_parallel._tensor_parallel.apply import install
from vescale_parallel._tensor_parallel.communicators import FakeRanks
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._tensor_parallel.operators import Kind
from vescale_parallel._tensor_parallel.read_by_forward.parameters import replaced
from vescale_parallel._tensor_parallel.shard_module import cut_parameters
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding, shard

# What it exports is not marked as exported.
spmd: Any = importlib.import_module("spmd_types")
checker: Any = importlib.import_module("spmd_types.checker")
MisfitError: type[Exception] = spmd.SpmdTypeError

SIZE = 2


def judge(model: nn.Module, batch: Mapping[str, Any], plan: Mapping[str, str]) -> None:
    """Raise unless the types of a sharded model's forward fit; the model is sharded in place.

    Raises:
        MisfitError: At the first operator whose operands do not fit.
    """
    sharding = shard(plan, model, SIZE)
    with _mesh() as mesh, spmd.set_current_mesh(mesh):
        group = mesh.get_group("tp")
        cut_parameters(model, sharding.placements, SIZE, 0)
        install(model, sharding, _TypedBoundary(group))
        _type_biases_of_sums(model, sharding)
        with checker.typecheck():
            _type_tensors(model, batch, sharding)
            _check_outputs(model(**batch), group)


@contextmanager
def _mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    try:
        yield init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


class _TypedBoundary(Boundary):
    """Conversions that are the judge's own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(FakeRanks(SIZE))
        self._group = group

    def take_rows(
        self, module: nn.Module, fqn: str, kind: LinearKind, placement: Placement
    ) -> None:
        """Have a layer that needs a bias find zeros which are no copy of an invariant one."""
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            zeros = module._parameters.get("bias")
            if zeros is not None and spmd.get_axis_local_type(zeros, self._group) is spmd.I:
                spmd.mutate_type(zeros, self._group, src=spmd.I, dst=spmd.R)
            return own(*args, **kwargs)

        module.forward = forward

    def _convert(
        self, x: Tensor, there: Kind, back: Kind, dim: int = 0, length: int = 0
    ) -> Tensor:
        match there, back:
            case "none", "sum":
                return spmd.convert(x, self._group, src=spmd.I, dst=spmd.R)
            case "sum", "none":
                return spmd.all_reduce(x, self._group, src=spmd.V, dst=spmd.I)
            case "gather", "scatter":
                return spmd.all_gather(x, self._group, src=spmd.S(dim), dst=spmd.R)
            case "scatter", "gather":
                return spmd.reduce_scatter(x, self._group, src=spmd.V, dst=spmd.S(dim))
            case "keep", "gather":
                return spmd.convert(x, self._group, src=spmd.I, dst=spmd.S(dim))
            case "gather", "keep":
                return spmd.all_gather(x, self._group, src=spmd.S(dim), dst=spmd.I)
            case _:
                raise AssertionError(f"no such conversion: {there}, backward {back}")


class _AddOnce(autograd.Function):
    """A whole parameter that one rank adds to partial values: I, and behind it a term of a P.

    The judge calls a term of a sum that is not taken yet V, as it does products of shards.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return parameter.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad

    @staticmethod
    def spmd_typecheck(outputs: Tensor, *, parameter: Tensor) -> None:
        spmd.assert_type(parameter, {"tp": spmd.I})
        spmd.assert_type(outputs, {"tp": spmd.V})


def _type_biases_of_sums(model: nn.Module, sharding: TensorSharding) -> None:
    for fqn in sharding.spec.reads:
        owner, _, name = fqn.rpartition(".")
        _read_once(model.get_submodule(owner), name)


def _read_once(module: nn.Module, name: str) -> None:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with replaced(module, {name: _AddOnce.apply(module._parameters[name])}):
            return own(*args, **kwargs)

    module.forward = forward


def _type_tensors(model: nn.Module, batch: Mapping[str, Any], sharding: TensorSharding) -> None:
    for fqn, parameter in model.named_parameters():
        spmd.assert_type(parameter, {"tp": _type_of(fqn, sharding)})
    for tensor in (*model.buffers(), *batch.values()):
        if isinstance(tensor, Tensor):
            spmd.assert_type(tensor, {"tp": spmd.R})
    # What models compute element by element in functions of their own.
    for function in _below(autograd.Function):
        if ".modeling_" in function.__module__:
            spmd.register_local_autograd_function(function)


def _type_of(fqn: str, sharding: TensorSharding) -> Any:
    """Return V of shards; R of what is whole and has a gradient that ranks sum; else I."""
    if fqn in sharding.placements:
        return spmd.V
    is_summed = fqn in sharding.spec.grads or fqn.rpartition(".")[0] in sharding.spec.shared
    return spmd.R if is_summed else spmd.I


def _below(base: type) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from _below(each)


def _check_outputs(output: Any, group: dist.ProcessGroup) -> None:
    """Raise unless the first output is whole, on all ranks with the same gradient."""
    first = next(value for value in output.values() if isinstance(value, Tensor))
    found = spmd.get_axis_local_type(first, group)
    assert found is spmd.I, f"expected logits that are invariant, got {found}"

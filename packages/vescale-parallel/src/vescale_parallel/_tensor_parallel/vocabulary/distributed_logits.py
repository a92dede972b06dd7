"""Where distributed logits reach the caller of a model: its inputs, its results, and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, forbid_gathers

from .vocab_parallel import LiftPlain, is_on, plain_gradient, returned


class DistributedLogits:
    """Calls of a model whose logits may stay sharded by vocabulary; see [Note: sharded logits].

    Args:
        mesh: Tensor-parallel ranks; None if there is one.
        lift: Lifts plain tensors to DTensors where an operator has both.
        communication: ``"declared"`` to refuse what the plan does not name.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        lift: LiftPlain | None,
        communication: Literal["implicit", "declared"],
    ) -> None:
        self._mesh, self._lift, self._communication = mesh, lift, communication
        self._gathers = False

    def with_plain_inputs(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Keep tensors of ranks apart from plain ones."""
        mesh, lift = self._mesh, self._lift
        if mesh is None or lift is None:
            return forward

        def run(*args: Any, **kwargs: Any) -> Any:
            # Tokens that were chosen from distributed logits come back as inputs.
            args = tuple(returned(arg, mesh, gathers=True) for arg in args)
            kwargs = {name: returned(arg, mesh, gathers=True) for name, arg in kwargs.items()}
            with lift.when_needed():
                return forward(*args, **kwargs)

        return run

    def declared(self) -> contextlib.AbstractContextManager[None]:
        """Refuse to gather what the plan leaves sharded, if it has to name what is moved."""
        if self._mesh is None or self._communication == "implicit":
            return contextlib.nullcontext()
        hint = (
            "tensor_parallel.communication is 'declared' and the sharding plan does not say so "
            "(a head's logits are gathered by '<out>': 'Replicate()')"
        )
        return forbid_gathers(self._mesh, hint=hint)

    def plain_results(self, module: nn.Module, args: object, output: Any) -> Any:
        """Return the model's output as its caller and its hooks get it, itself a forward hook."""
        assert self._mesh is not None
        return returned(output, self._mesh, gathers=self._gathers)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Have calls return whole logits, for code of the model that reads them."""
        held, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = held

    def is_ours(self, leaf: DTensor) -> bool:
        """Whether a result is distributed over tensor-parallel ranks."""
        return is_on(leaf, self._mesh)

    def plain_gradient_of(self, output: Tensor) -> None:
        """Have a plain result get a plain gradient, whatever it meets outside of the model."""
        if self._lift is not None and not isinstance(output, DTensor):
            output.register_hook(plain_gradient)

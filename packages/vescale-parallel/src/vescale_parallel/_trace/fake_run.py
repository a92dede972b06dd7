"""One driver of runs on fake tensors, to which observation, axes and dry runs listen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.distributions import Distribution

from vescale_parallel._model.copies import drop_hooks
from vescale_parallel._model.kept_outside import nothing_kept_outside
from vescale_parallel._torch_private import FakeTensorMode, TorchDispatchMode, pytree

from .fake_tensors import (
    ObservationError,
    all_integer,
    fake_batch,
    fake_output,
    is_float,
    skeleton,
)
from .fused_attention import refused_without_heads
from .generators import untouched_generators
from .known_values import KnownValues


class Operator(NamedTuple):
    """An operator that has run.

    Attributes:
        func: What torch dispatches.
        inputs: The tensors among its arguments.
        output: A tree of fake tensors. What it has of integers is real if the operator
            ``is_integer``, or if the values that it saw are known.
        is_integer: Whether it ran for real alone: all that it saw and gave is integer.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[torch.Tensor]
    output: Any
    is_integer: bool


class Listener:
    """Hears what happens in a run, in order; what is not overridden is not heard."""

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is called."""

    def left(self, fqn: str, output: Any) -> None:
        """The module that was entered last and not left returns."""

    def raised(self, fqn: str) -> None:
        """The module that was entered last and not left raises; its caller may go on."""

    def operator(self, ran: Operator) -> None:
        """An operator has run, in the module that was entered last and not left."""


class FakeRun:
    """A copy of a model that has shapes and no memory, and one forward of it.

    ``refused`` returns what is raised instead of what the forward raises.

    Floating-point tensors are fake. Integers stay real, so that code that looks at masks and
    positions works; so does code that looks at masks of floating-point numbers, see
    :class:`KnownValues`. Modes that a listener wants around the forward, such as whether there
    are gradients, it puts there itself.

    Attributes:
        fake_mode: Whose tensors the copy has.
        values: What is known of them.
        model: The copy. It may be changed before the forward.
        operator: Name of the latest operator.
        hooks: Numbers of the hooks by which listeners hear of modules.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        refused: Callable[[FakeRun, Exception], Exception] | None = None,
    ) -> None:
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = KnownValues()
        self.model = skeleton(model, self.fake_mode, self.values)
        drop_hooks(self.model)
        self.operator = ""
        self.hooks: set[int] = set()
        self._refused = refused or _observation_error
        self._inside: list[str] = []
        self._raised: tuple[BaseException, str] | None = None

    @property
    def fqn(self) -> str:
        """Of the innermost module that is running, or, behind the forward, that raised."""
        if self._inside or self._raised is None:
            return self._inside[-1] if self._inside else ""
        return self._raised[1]

    def batch(self, batch: Any) -> Any:
        """Return a batch of fake tensors for the forward."""
        return fake_batch(batch, self.fake_mode, self.values)

    def forward(
        self, given: tuple[tuple[Any, ...], Mapping[str, Any]], *listeners: Listener
    ) -> Any:
        """Run the copy, draw nothing from generators, and return its output.

        Raises:
            ObservationError: Or what ``refused`` returns, if the forward raises.
        """
        args, kwargs = given
        handles = list(self._register(listeners))
        try:
            # Real integer operators may draw; the states also cover dropout's checks.
            with (
                nothing_kept_outside(self.model),
                untouched_generators(),
                refused_without_heads(),
                _UncheckedDistributions(),
                _Mode(self, listeners),
            ):
                return self.model(*args, **kwargs)
        # Arbitrary user code: whatever it raises means that it cannot run on shapes alone.
        except Exception as error:
            raise self._refused(self, error) from error
        finally:
            self._raised = None  # an error keeps the tensors of its frames
            for handle in handles:
                handle.remove()

    def heard(self, func: Any) -> None:
        """Keep the name of an operator that is about to run."""
        self.operator, self._raised = str(func), None

    def _register(
        self, listeners: tuple[Listener, ...]
    ) -> Iterator[torch.utils.hooks.RemovableHandle]:
        # On the copy, whose hooks nobody else sees.
        for fqn, module in self.model.named_modules():
            entered, left = self._hooks(fqn, listeners)
            for handle in (
                module.register_forward_pre_hook(entered, prepend=True, with_kwargs=True),
                module.register_forward_hook(left, always_call=True),
            ):
                self.hooks.add(handle.id)
                yield handle

    def _hooks(
        self, fqn: str, listeners: tuple[Listener, ...]
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        handled: list[BaseException | None] = []

        def entered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside.append(fqn)
            handled.append(sys.exception())
            for each in listeners:
                each.entered(fqn, args, kwargs)

        def left(_: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()
            error = sys.exception()
            if error is handled.pop():
                error = None  # that of a caller that calls the module to handle it
            if error is not None and (self._raised is None or self._raised[0] is not error):
                self._raised = error, fqn
            for each in listeners:
                if error is None:
                    each.left(fqn, output)
                else:
                    each.raised(fqn)

        return entered, left


class _UncheckedDistributions:
    """Has ``torch.distributions`` look at no values while any thread is within.

    Their checks raise where an argument or a sample is none of theirs, and compute nothing: what
    has shapes alone runs without them. Those that code asks for (``validate_args=True``) stay.
    """

    _lock, _num_within, _are_checked = threading.Lock(), 0, True

    def __enter__(self) -> Self:
        cls = type(self)
        with cls._lock:
            if not cls._num_within:
                cls._are_checked = Distribution._validate_args
                Distribution.set_default_validate_args(False)
            cls._num_within += 1
        return self

    def __exit__(self, *error: object) -> None:
        cls = type(self)
        with cls._lock:
            cls._num_within -= 1
            if not cls._num_within:
                Distribution.set_default_validate_args(cls._are_checked)


class _Mode(TorchDispatchMode):
    """Runs every operator: on fake tensors, or for real if all it sees and gives is integer."""

    def __init__(self, run: FakeRun, listeners: tuple[Listener, ...]) -> None:
        super().__init__()
        self._run, self._listeners = run, listeners

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked for by most operators, through us
            return args[0].fake_device
        kwargs = kwargs or {}
        self._run.heard(func)
        inputs = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        is_integer = all_integer(inputs, kwargs, func, args)
        if is_integer:
            output = func(*args, **kwargs)
        else:
            output = self._fake_output(func, args, kwargs, inputs)
        ran = Operator(func, args, kwargs, inputs, output, is_integer)
        for each in self._listeners:
            each.operator(ran)
        return output

    def _fake_output(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:
        values, fake_mode = self._run.values, self._run.fake_mode
        known = values.run(func, args, kwargs, inputs)
        if known is not None and len(known) == 1 and not _is_float_tensor(known[0]):
            return known[0]
        output = fake_output(func, args, kwargs, fake_mode)
        if known is not None:
            values.note(pytree.tree_leaves(output), known)
        return output


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_float(value.dtype)


def _observation_error(run: FakeRun, error: Exception) -> ObservationError:
    inside = f"{run.fqn!r} ({type(run.model.get_submodule(run.fqn)).__name__})"
    return ObservationError(
        f"expected a forward that runs on shapes alone, got {type(error).__name__} in module "
        f"{inside} at operator {run.operator or 'none'}: {error}"
    )

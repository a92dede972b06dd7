"""One call of a parallelized model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, announced_failures, profiler_range, untold
from vescale_parallel._cross_replica.batch import BatchRows
from vescale_parallel._cross_replica.borders import Rows, may_be_uneven
from vescale_parallel._data_parallel.zero_state import ZeroState
from vescale_parallel._loss.equal_rows import EqualRows
from vescale_parallel._loss.inputs_of_means import InputsOfMeans
from vescale_parallel._loss.output import is_loss, refuse_closed
from vescale_parallel._loss.returned import ReturnedLosses
from vescale_parallel._loss.token_mean import AverageOverRanks, TokenMeans
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._model.structures import opening
from vescale_parallel._parameters.ends_of_call import EndsOfCall
from vescale_parallel._pipeline.execution import tensors_with_graph
from vescale_parallel._pipeline.step import PipelineStep
from vescale_parallel._rng.sharded_rng import ShardedRng
from vescale_parallel._tensor_parallel.vocabulary.distributed_logits import DistributedLogits
from vescale_parallel._torch_private import is_in_backward, is_transformed, pytree

from .accumulation import AccumulatedStep
from .arguments import Arguments
from .cast_inputs import explain_dtypes, with_cast_inputs
from .compared.passes import ComparedPasses
from .compared.same_inputs import SameInputs
from .outside import KnownModules, explain_gradients, read_in, refuse_trainers

Args = tuple[Any, ...]
Named = dict[str, Any]


class ProvesCalls(Protocol):
    """What calls a plan was compared with one device for, and the check for others."""

    def proven(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Compare the plan with one device for a call of a new form; run the call inside."""
        ...


@dataclass(eq=False, kw_only=True)
class Engine:
    """Runs the calls of a parallelized model on this rank; see [Note: who wraps a module].

    Attributes:
        mesh: The plan's mesh.
        parameters: Has them gathered and shown, and reduces their gradients.
        data_ranks: Those that share a batch.
        arguments: Takes a batch by name, and says what is wrong with one.
        inputs: Compares what ranks are called with.
        known: The modules that were there.
        proofs: Of what is cut, for calls.
        rows: Of the batch: where they are coupled, a call is of the whole batch.
        rng: Random numbers in forward.
        logits: Those that stay cut by vocabulary.
        losses: What may be a loss, among what calls return.
        pipeline: Runs a step's schedule; None without stages.
        accumulation: Runs a step's micro-batches without stages; None for one.
        input_dtype: Of floating-point inputs in forward; None for their own.
        is_at_uneven: Whether ranks now have batches of other numbers of rows.
        completed: Returns arguments with what calls of this plan say besides.
        keeps_caches: Whether a rank can keep keys and values of what it generates.
        is_running: Whether a call runs now.
        has_run: Whether a call has run.
    """

    mesh: DeviceMesh
    parameters: ZeroState
    data_ranks: DataRanks
    arguments: Arguments
    inputs: SameInputs
    known: KnownModules
    proofs: Sequence[ProvesCalls]
    rows: BatchRows
    rng: ShardedRng
    logits: DistributedLogits
    losses: ReturnedLosses
    pipeline: PipelineStep | None
    accumulation: AccumulatedStep | None = None
    input_dtype: torch.dtype | None = None
    is_at_uneven: Callable[[], bool] = lambda: False
    completed: Callable[[Args, Named], tuple[Args, Named]] = lambda args, kwargs: (args, kwargs)
    keeps_caches: bool = True
    is_running: bool = False
    has_run: bool = False

    def __post_init__(self) -> None:
        self.rng.is_of_all_rows = self.rows.run_over_all
        self.compared = ComparedPasses(self.mesh)
        after_backward = functools.partial(_after_backward, self.inputs, self.compared)
        self.parameters.after_backward = after_backward
        self.equal_rows = EqualRows(self.data_ranks, is_delayed=self.mesh.device_type != "cpu")

    def call(
        self,
        forward: Callable[..., Any],
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the model on this rank's batch. Every rank must call this."""
        if self.is_running:  # its forward calls itself, which is a part of the call
            return forward(*args, **kwargs)
        args, kwargs = self.completed(*self.arguments.by_name(args, kwargs))
        phase = "forward" if self.pipeline is None else "pipeline"
        with announced_failures(), profiler_range(phase), untold():
            if is_in_backward():
                raise RuntimeError(
                    "a parallelized model was called inside a backward pass, as checkpointing "
                    "all of it does; checkpoint its blocks instead (recompute='full'). Of a loss "
                    "that runs the model again in its backward (GradCache), parallelize the "
                    "module of the loss, which calls the model"
                )
            if is_transformed():
                raise ValueError(
                    "a parallelized model was called within torch.vmap or torch.func.grad, which "
                    "no collective can be part of: call it on the whole batch, and differentiate "
                    "by backward() or torch.autograd.grad"
                )
            try:
                output = self._call(forward, model, args, kwargs)
            except (TypeError, AttributeError, RuntimeError) as error:
                self.arguments.explain(args, kwargs, error)
                raise
            is_step = self.pipeline is not None and torch.is_grad_enabled()
            refuse_closed(output, has_graph=not is_step)
            return output

    def _call(
        self,
        forward: Callable[..., Any],
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not self.has_run and self.mesh.size() > 1:
            refuse_trainers()
        self.has_run = True
        self.equal_rows.look()
        if torch.is_grad_enabled() and (by := self._parts_by()):
            self.arguments.refuse_gradients(args, kwargs, by)
        self.inputs.check(args, kwargs)
        self.parameters.recover()
        self.known.check()
        self.parameters.begin_forward()
        forward = with_cast_inputs(opening(forward), self.input_dtype)
        forward = self.logits.with_plain_inputs(forward)
        self.is_running = True
        try:
            with (
                self._proven(model, args, kwargs),
                self.logits.declared(),
                self.rows.of_call(model, args, kwargs, in_parts_by=self._parts_by()),
            ):
                coupling = self.rows.coupling
                if coupling.regions:
                    self.parameters.rows_are_coupled = True
                self.parameters.writes.is_known = coupling.is_written if coupling.written else None
                num_rows, knows_rows = coupling.num_rows(args, kwargs), self.rows.is_checked
                self.compared.beside.num_rows = num_rows
                rows = coupling.rows_of(args, kwargs, to_cut=bool(self._parts_by()))
                self.rng.are_rows_uneven = may_be_uneven(rows, self.data_ranks.num_parts)
                self.compared.drawn.see(args, kwargs, rows)
                if self.pipeline is not None:
                    with self.rng.of_call(model, args, kwargs, num_rows):
                        output = self.pipeline.run(
                            forward, args, kwargs, coupling, knows_rows=knows_rows
                        )
                    return self._differentiable(output)
                if self.accumulation is not None and torch.is_grad_enabled():
                    run = functools.partial(self.accumulation.run, knows_rows=knows_rows)
                    return run(forward, args, kwargs, rows, self._check_plain, coupling.ratios)
                ends = self._ends_of_call()
                forward = ends.with_inputs(forward, args, kwargs)
                with self.rng.of_call(model, args, kwargs, num_rows):
                    return ends.results(self._call_directly(forward, args, kwargs, num_rows))
        except RuntimeError as error:
            explain_gradients(error, self.parameters.params_of_blocks)
            explain_dtypes(error, model, self.input_dtype)
            raise
        finally:
            self.is_running = False
            self.parameters.end_forward()

    def _parts_by(self) -> str:
        """Return who runs this rank's rows in parts in a call now, if somebody does."""
        if self.pipeline is not None:
            return "a pipeline"
        is_cut = self.accumulation is not None and torch.is_grad_enabled()
        return "batch.gradient_accumulation" if is_cut else ""

    def generation_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what transformers' ``generate`` is called with, given what its caller says."""
        options = dict(given)
        if not self.keeps_caches:
            options.setdefault("use_cache", False)
        if self.parameters.gathers_in_forward and options.get("synced_gpus") is None:
            # Ranks whose rows are done go on as long as others need their parameters.
            options["synced_gpus"] = True
        return options

    @contextlib.contextmanager
    def _proven(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self.proofs:
                stack.enter_context(each.proven(model, args, kwargs))
            yield

    def _call_directly(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_rows: int,
    ) -> Any:
        ranks = self.data_ranks
        if ranks.num_parts == 1:  # every rank has the whole batch, and its loss
            return forward(*args, **kwargs)
        means = TokenMeans(ranks.size, lambda _, count: ranks.total(count))
        inputs = InputsOfMeans(ranks.num_parts, self.compared.factors.note)
        coupling = self.rows.coupling
        if torch.is_grad_enabled():
            rows = coupling.rows_of(args, kwargs)
            args, kwargs = inputs.watched(args, kwargs, rows)
        with means:
            output = forward(*args, **kwargs)
        self._check_plain(output)
        if coupling.is_region(""):  # of the whole batch already
            returned = coupling.returned or ()
            inputs.note_results(output, [isinstance(rows, Rows) for _, rows in returned])
            return output
        if self.is_at_uneven():
            _check_counted(output, means)
        output = self.losses.checked(output, means, knows_rows=self.rows.is_checked)
        mean = ranks.mean if means.means else self.equal_rows.mean_of(num_rows)
        return pytree.tree_map(
            lambda x: AverageOverRanks.apply(x, mean, inputs) if is_loss(x) else x, output
        )

    def _differentiable(self, output: Any) -> Any:
        """Return what a pipeline gives a loop that may compute its loss from it."""
        roots = tensors_with_graph(output)
        if roots and not any(map(is_loss, roots)):
            for root in roots:
                self.logits.plain_gradient_of(root)
            if self.data_ranks.num_parts > 1:
                self.losses.warn_of_none()
        return output

    def _ends_of_call(self) -> EndsOfCall:
        return EndsOfCall(
            self.parameters.watch,
            self.logits.plain_gradient_of,
            self.parameters.asked.of_call,
            lambda: self.is_running,
        )

    def _check_plain(self, output: Any) -> None:
        """Refuse a result that mixes this rank's rows with parameters that all ranks hold."""
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, DTensor) and not self.logits.is_ours(leaf):
                read = read_in(leaf, self.parameters.params_of_blocks)
                raise ValueError(
                    f"expected forward to return plain tensors, got a DTensor: it read {read} "
                    "outside of the forward of its block, where data_parallel.zero_stage 2 and 3 "
                    "keep it sharded. Its plain tensors are this rank's rows, so the two do not "
                    "mix. Use data_parallel.zero_stage 1, or read "
                    "what you need as parameter.full_tensor()"
                )


def _check_counted(output: Any, means: TokenMeans) -> None:
    """Refuse scalars of batches with other numbers of rows that are no means over targets."""
    counted = {id(mean) for mean in means.means}
    scalars = [leaf for leaf in pytree.tree_leaves(output) if is_loss(leaf)]
    if any(id(scalar) not in counted for scalar in scalars):
        raise ValueError(
            "data-parallel ranks have other numbers of rows of this batch, the last one of an "
            "epoch, and the model returned a scalar that need not count rows or targets, so the "
            "mean over ranks would not be that of one device. Leave the batch out "
            "(drop_last=True), return what F.cross_entropy or F.nll_loss returns, or return "
            "tensors with rows and reduce them yourself"
        )


def _after_backward(inputs: SameInputs, compared: ComparedPasses, factor: Tensor | None) -> None:
    inputs.after_backward()
    if factor is not None:
        compared.factors.note(factor)
    compared.compare()

"""The rows of a batch over data-parallel ranks: coupled rows are computed over all of it."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import all_gather
from vescale_parallel._mesh.agreement import gathered_objects
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._model.inputs import bind, opened
from vescale_parallel._model.leaf_names import names_of_call
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import pytree

from .added.summed_buffers import SummedBuffers
from .batches.graphs import refused_parts
from .batches.over_lists import BATCH_NORMS, over_lists, refused_lists
from .borders import NOWHERE, RowCoupling
from .call_guard import RowGuard
from .dims.find_packed import given_whole, uncut_error
from .regions.row_converter import bounds_error
from .regions.row_regions import RowRegions

# Calls in which what has no rows is compared.
_FIRST_CALLS, _EVERY = 4, 64


class BatchRows:
    """What a parallelized model knows of the rows of its batches.

    Without a ``guard`` the batch is in one part. There are no ``regions`` in a pipeline; rows that
    depend on each other are refused there, and within the blocks of ``sliced`` stacks, which
    compute on slices of sequences.

    Attributes:
        coupling: Of the call that runs.
        summed: Buffers that rows add to where code does not run over all of them.
    """

    def __init__(
        self,
        guard: RowGuard | None,
        regions: RowRegions | None,
        ranks: DataRanks,
        groups: Sequence[dist.ProcessGroup],
        num_parts: int,
        *,
        sliced: Sequence[str] = (),
    ) -> None:
        self._guard, self._regions = guard, regions
        self._groups, self._num_parts = groups, num_parts
        self._sliced = tuple(f"{each}." for each in sliced)
        self._said, self._num_calls = set[str](), 0
        self.coupling, self.is_checked = NOWHERE, True
        self.summed = SummedBuffers(ranks, self._is_whole)

    def prepare(self, model: nn.Module, fqns: Sequence[str]) -> None:
        """Be ready for dependent rows in modules whose forward is wrapped after this."""
        if self._regions is not None:
            self._regions.prepare(model, fqns)

    def are_coupled(self) -> bool:
        """Whether some rows of the call that runs depend on others."""
        return bool(self.coupling.regions)

    def are_coupled_in(self, fqn: str) -> bool:
        """Whether a module computes over the rows of all ranks in what runs now."""
        return self._regions is not None and self._regions.coupling.is_within(fqn)

    def run_over_all(self) -> bool:
        """Whether code runs now that computes over the rows of all ranks."""
        return self._regions is not None and self._regions.is_inside

    def _is_whole(self, given: Any) -> bool:
        regions = self._regions
        return regions is not None and (regions.is_inside or regions.is_whole(given))

    @contextmanager
    def of_call(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        in_parts_by: str = "",
    ) -> Iterator[None]:
        """Run a call; where rows depend on each other it is of the batch of all ranks.

        ``in_parts_by`` is who runs this rank's rows in micro-batches, if somebody does.

        Raises:
            ValueError: If rows depend on each other and run in parts, or ranks have batches of
                other shapes.
        """
        if self._guard is None:
            yield
            return
        self.coupling, self.is_checked = self._guard.coupling(model, args, kwargs)
        if in_parts_by:
            self.coupling = self._guard.with_packed(self.coupling, model, args, kwargs)
        if not self.coupling.kept <= self._said:
            self._said |= self.coupling.kept
            warn_at_user_line(_kept_warning(self.coupling))
        apart = self.coupling.apart
        is_sliced = self._is_sliced(self.coupling) and not (apart and apart.ratios)
        if apart is not None and (in_parts_by or is_sliced):
            self.coupling = apart
        if self._regions is not None and not in_parts_by:
            self.coupling, why = over_lists(self.coupling, model)
            if why is not None and why not in self._said:
                self._said.add(why)
                warn_at_user_line(why)
        try:
            if in_parts_by:
                _refuse_parts(self.coupling, in_parts_by)
            with (
                self.summed.of_call(model, self.coupling),
                self._over_all_rows(model, args, kwargs, in_parts_by),
            ):
                yield
        except Exception as error:
            if in_parts_by and (names := given_whole(self.coupling.given, args, kwargs)):
                error.add_note(uncut_error(names))
            raise
        finally:
            self.coupling, self.is_checked = NOWHERE, True

    @contextmanager
    def _over_all_rows(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        in_parts_by: str,
    ) -> Iterator[None]:
        if not self.coupling.regions:
            if self._regions is None:
                yield
                return
            # What is known is not that of a call before, of another form.
            with self._regions.of_call(self.coupling, self.coupling.num_rows(args, kwargs)):
                yield
            return
        if in_parts_by and self._regions is None and not torch.is_grad_enabled():
            # A pipeline without others runs the whole batch at once.
            yield
            return
        if in_parts_by:
            raise ValueError(_refused_regions(self.coupling, in_parts_by, self._num_parts))
        if self._regions is None:  # one rank has the whole batch
            yield
            return
        if self._is_sliced(self.coupling):
            raise ValueError(_refused_context(self.coupling))
        if "" in self.coupling.of_elements:
            raise ValueError(bounds_error("", self.coupling.reason("")))
        self._check_order(model, args, kwargs)
        self._check_shapes(args, kwargs)
        self._regions.watch(model, self.coupling)
        with self._regions.of_call(self.coupling, self.coupling.num_rows(args, kwargs)):
            yield

    def _is_sliced(self, coupling: RowCoupling) -> bool:
        """Whether rows depend on each other in blocks that compute on slices of sequences."""
        return any(fqn.startswith(self._sliced) for fqn in coupling.regions)

    def _check_order(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise if the order of rows is not one device's, and may matter."""
        if self._guard is None or not self._guard.are_rows_apart((tuple(args), dict(kwargs))):
            return
        ordered = [
            name
            for name, module in model.named_modules()
            if self.coupling.is_region(name) and not isinstance(module, BATCH_NORMS)
        ]
        if ordered:
            raise ValueError(
                "rows of the batch depend on each other in "
                f"{', '.join(repr(name or 'the model') for name in ordered)}, and collate_fn of "
                "the data loader puts rows of one sample apart, all first ones before all second "
                "ones; the rows of two ranks, one behind the other, are then in another order "
                "than one device's. Have it return each kind of row as a tensor of its own, and "
                "torch.cat them in forward, or use data_parallel.size 1"
            )

    def _without_rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return tensors that ranks should have alike, in calls in which that is compared."""
        call, self._num_calls = self._num_calls, self._num_calls + 1
        rows = self.coupling.rows_of(args, kwargs)
        if rows is None or not (call < _FIRST_CALLS or call % _EVERY == 0):
            return {}
        tree = tuple(args), dict(kwargs)
        leaves = zip(names_of_call(*tree), pytree.tree_leaves(tree), rows, strict=True)
        return {
            name: x.detach()
            for name, x, where in leaves
            if where is None and type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
        }

    def _check_shapes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        devices = [x.device for x in leaves if isinstance(x, Tensor)]
        shapes = self.coupling.shapes_of(args, kwargs)
        without_rows = self._without_rows(args, kwargs)
        own = torch.tensor(
            [_digest(repr(shapes).encode()), _digest(*map(_bytes_of, without_rows.values()))],
            device=devices[0] if devices else "cpu",
        )
        found = own
        for group in self._groups:
            found = all_gather(found, group).flatten()
        same_shapes, same_values = (found.view(-1, 2) == own).all(0).tolist()
        names = ", ".join(repr(fqn or "the model") for fqn in self.coupling.regions)
        if same_shapes and not same_values:
            raise ValueError(
                f"rows of the batch depend on each other in {names}, which is computed over the "
                f"rows of all data-parallel ranks, and of what it is called with "
                f"{', '.join(without_rows)} has no rows of the batch but other values on other "
                "ranks. Give it as many rows as the batch has, by padding the targets of every "
                "row to one number for example, or use data_parallel.size 1"
            )
        if not same_shapes and self.coupling.of_elements:
            fqn = min(self.coupling.of_elements)
            raise ValueError(bounds_error(fqn, self.coupling.reason(fqn)))
        if not same_shapes:
            raise ValueError(
                f"rows of the batch depend on each other in {names}, so all data-parallel ranks "
                f"need batches of the same shapes, and they have others; this rank has "
                f"{shapes}. Pad to one length on all ranks and drop a last batch that does not "
                "divide"
            )


def _digest(*values: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"".join(values)).digest()[:7], "big")


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def exchange_over(groups: Sequence[dist.ProcessGroup]) -> Callable[[Any], list[Any]]:
    """Return what gathers values of all ranks of some groups, each of which must call it."""

    def gather(value: Any) -> list[Any]:
        return gathered_objects(value, groups)

    def exchange(value: Any) -> list[Any]:
        if "torch._dynamo" in sys.modules:
            # torch.compile(model) would compile it, and cannot: objects of any kind are sent.
            return cast("Any", torch.compiler).disable(gather)(value)
        return gather(value)

    return exchange


def _kept_warning(coupling: RowCoupling) -> str:
    names = ", ".join(map(repr, sorted(coupling.kept)))
    return (
        f"forward keeps {names} in attributes of modules, made of rows of the batch, and no call "
        "computes with it: each rank has what its own rows of the latest micro-batch leave there, "
        "not what one device has. Make it a buffer (register_buffer) to have it made of the rows "
        "of all data-parallel ranks"
    )


def _refused_context(coupling: RowCoupling) -> str:
    return (
        f"rows of the batch depend on each other ({_listed(coupling)}) within blocks, which "
        "compute on slices of sequences under context_parallel. Use data_parallel.size 1 or "
        "context_parallel.size 1, or compute it outside of blocks"
    )


def check_micro_batches(plan: ParallelPlan, model: nn.Module, batch: Any) -> None:
    """Raise what a call in micro-batches would raise for a batch. Nobody communicates.

    Where it cannot be checked whether rows depend on each other, the first call warns, and
    nothing is raised.

    Args:
        plan: How the rows of the batch are divided.
        model: Real, on the meta device, or deferred; not changed.
        batch: What one rank gives the model, or a few rows of it.

    Raises:
        ValueError: If the plan runs rows one part after the other that depend on each other.

    Example:
        >>> check_micro_batches(ParallelPlan(), nn.Linear(2, 2), torch.ones(4, 2))
    """
    pipelined = plan.pipeline_parallel.size > 1
    num_parts = plan.data_parallel.size * plan.num_microbatches
    if num_parts == 1 or not (pipelined or plan.batch.gradient_accumulation > 1):
        return
    if any(x.is_meta for x in pytree.tree_leaves(opened(batch)) if isinstance(x, Tensor)):
        return  # which rows are compared by values
    guard = RowGuard(model, lambda own: [own], losses_only=pipelined, in_one_piece=False)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # the first call gives them
        coupling, _ = guard.coupling(model, *bind(model, batch))
    coupling = coupling if coupling.apart is None else coupling.apart
    by = "a pipeline" if pipelined else "batch.gradient_accumulation"
    _refuse_parts(coupling, by)
    if coupling.regions:
        raise ValueError(_refused_regions(coupling, by, num_parts))


def _refuse_parts(coupling: RowCoupling, in_parts_by: str) -> None:
    """Raise if a call in micro-batches leaves something behind that rows depend on.

    Raises:
        ValueError: If it does.
    """
    if coupling.of_graphs:
        raise ValueError(refused_parts(in_parts_by))
    if coupling.in_lists:
        raise ValueError(refused_lists(in_parts_by))
    if coupling.written:
        raise ValueError(_refused_writes(coupling, in_parts_by))
    if coupling.rows_read and torch.is_grad_enabled():
        raise ValueError(_refused_rows(coupling, in_parts_by))


def _refused_regions(coupling: RowCoupling, in_parts_by: str, num_parts: int) -> str:
    """Return what to say of rows that depend on each other in micro-batches."""
    # Which gives the loop the outputs of all micro-batches.
    of_loop = (
        ", or, with data_parallel.size 1, compute the loss in the loop, of what forward returns"
    )
    return (
        f"rows of the batch depend on each other ({_listed(coupling)}), but {in_parts_by} runs it "
        f"in {num_parts} micro-batches, one after the other. Use pipeline_parallel.size 1 and "
        "batch.gradient_accumulation 1, under which data-parallel ranks compute that code over "
        "the whole batch, or a loss that is a mean over rows (F.cross_entropy counts the "
        "targets of all micro-batches; so does, outside of blocks, what divides in "
        "(loss * mask).sum() / mask.sum())" + (of_loop if in_parts_by == "a pipeline" else "")
    )


def _listed(coupling: RowCoupling) -> str:
    """Return where rows depend on each other, and why, as text."""
    return "; ".join(f"{fqn or 'the model'!r}: {why}" for fqn, why in coupling.regions.items())


def _refused_writes(coupling: RowCoupling, in_parts_by: str) -> str:
    names = ", ".join(sorted(coupling.written))
    return (
        f"forward writes to parameters ({names}), but {in_parts_by} runs it several times a step. "
        "Write to them after optimizer.step(), make them buffers, or use pipeline_parallel.size 1 "
        "and batch.gradient_accumulation 1"
    )


def _refused_rows(coupling: RowCoupling, in_parts_by: str) -> str:
    names = ", ".join(map(repr, sorted(coupling.rows_read)))
    return (
        f"forward keeps {names} for every row of a batch and computes with it in the next call, "
        f"but {in_parts_by} runs it in micro-batches, each of other rows. Use "
        "pipeline_parallel.size 1 and batch.gradient_accumulation 1, or give it to the model with "
        "the batch"
    )

"""Calls of a model's forward on one rank of a pipeline: its stages' passes, and what precedes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from vescale_parallel._loss.sum_ratios import ratios_to_count
from vescale_parallel._loss.token_mean import TokenCounts, TokenMeans
from vescale_parallel._model.copies import own_containers

from .cuts.configurations import Settings, changed_settings
from .cuts.hooks import hooks_where_real
from .cuts.placeholders import Placeholder
from .cuts.seen_call import SeenCall, seen_call
from .cuts.values import Cuts, ObservedValues
from .stage_module import Receive, StageDone, StageRun, Staging
from .targets import Form, SeenCounts, TargetCounts, check_known, run_counting, summed_counts

Microbatch = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(eq=False)
class StageCalls:
    """Calls the model's own forward for the stages of one rank.

    Attributes:
        staging: Shared with the staged modules of the model.
        starts: Index of the first block of every stage.
        num_blocks: Number of blocks.
        device_type: Of the mesh.
        has_last_stage: Whether this rank has it.
        total: Sums a float64 tensor over data-parallel ranks.
        agree: Given a key and the last stage's object, returns that on all ranks.
        scalars: Returns what modules keep that may be losses, by their names.
        settings: Returns what is in configurations of modules.
        write_settings: Writes into them.
        are_counted: Of the call that runs; see :class:`.SumRatios`.
        knows_rows: Whether it was checked that its losses are means over rows.
    """

    staging: Staging
    starts: Sequence[int]
    num_blocks: int
    device_type: str
    has_last_stage: bool
    total: Callable[[Tensor], Tensor]
    agree: Callable[[object, Any], Any]
    scalars: Callable[[], Mapping[str, Tensor]] = dict
    settings: Callable[[], Settings] = dict
    write_settings: Callable[[Settings], None] = lambda settings: None
    are_counted: Sequence[bool] = ()
    knows_rows: bool = False
    _forms_seen: dict[object, SeenCall] = field(default_factory=dict[object, SeenCall])
    _checked_loss: bool = False

    def __post_init__(self) -> None:
        self._counts = TargetCounts(self._run_counting)
        self._seen = SeenCounts(
            is_delayed=self.device_type != "cpu", otherwise="pipeline_parallel.size 1"
        )

    def seen(
        self, form: object, forward: Callable[..., Any], first: Callable[[], Microbatch]
    ) -> SeenCall:
        """Return what the last stage sees in the first call of a form, and tells the others.

        ``first`` returns a micro-batch of it.
        """
        if form in self._forms_seen:
            return self._forms_seen[form]
        microbatch = first()
        seen, failed = None, None
        if self.has_last_stage:
            # What a model's own code raises the other ranks would wait for.
            try:
                seen = self._look(forward, microbatch)
            except Exception as error:
                failed = error
        seen = self.agree(("what is in a call", form), seen)
        if failed is not None:
            raise failed
        if seen is None:
            self._look(forward, microbatch)
            raise ValueError(
                "forward raised an error on the last stage of a pipeline and on no other one, "
                "when it was run with placeholders; see what that rank says"
            )
        self.write_settings(seen.settings)
        self._forms_seen[form] = seen
        return seen

    def count(
        self,
        forward: Callable[..., Any],
        microbatches: Sequence[Microbatch],
        form: Hashable,
        seen: SeenCall,
    ) -> list[Tensor]:
        """Return what each token mean of the module counts over the global batch.

        Nothing on ranks whose stages compute none.

        Runs forward, where it has to, with placeholders for what every block and every other
        module with parameters returns, so that the targets of all micro-batches are known before
        the first backward pass.
        """
        if not self.has_last_stage and not seen.counts_early:
            return []
        of_call = Form(form, self.are_counted)
        found = [self._counts.of(forward, each, of_call) for each in microbatches]
        for counts in found:
            check_known(counts, "a pipeline")
        local = summed_counts(found, otherwise="pipeline_parallel.size 1")
        self._seen.expect(local if self.has_last_stage else ())
        return [self.total(count) for count in local]

    def check_counts(self) -> None:
        """Raise if the passes of a call counted other targets than were counted before."""
        self._seen.check()

    def run(
        self,
        stage: int,
        cuts: Cuts,
        receive: Receive,
        forward: Callable[..., Any],
        microbatch: Microbatch,
        num_parts: float,
        counts: Sequence[Tensor],
        loss_of: Callable[[Any], Tensor] | None,
    ) -> Any:
        """Return what a stage sends for a micro-batch; the last one what the module returns.

        ``num_parts`` is how many micro-batches like this one the global batch has, ``counts`` what
        token means count in it, ``loss_of`` returns the loss that is differentiated, if one is.
        """
        run = self._stage_run(stage, cuts, receive)
        self.staging.run = run
        # Put back afterwards: a model may call another one.
        was_usable = Placeholder.usable
        # The first stage needs none: what it does not own comes later.
        Placeholder.usable = run.stage > 0
        known = functools.partial(self._known_count, run, counts)
        means = TokenMeans(num_parts, known, ratios_to_count(self.are_counted))
        # Other stages of this rank are given the same, and what it is tells tensors' shapes apart.
        args, kwargs = own_containers(microbatch)
        try:
            with _explained(), run.running(), hooks_where_real(self.staging.around, run), means:
                output = forward(*args, **kwargs)
        except StageDone as done:
            return done.activations
        finally:
            self.staging.run = None
            Placeholder.usable = was_usable
        run.check_complete(self.staging.blocks)
        means.check_complete()
        if loss_of is not None and not (self._checked_loss or self.knows_rows):
            self._checked_loss = True
            means.warn_of_sums(loss_of(output))
        return output

    def _stage_run(self, stage: int, cuts: Cuts, receive: Receive) -> StageRun:
        bounds = [*self.starts, self.num_blocks]
        first, end = bounds[stage], bounds[stage + 1]
        takes, sends = cuts.get(first, ()) if stage else (), cuts.get(end, ())
        last = stage == len(self.starts) - 1
        return StageRun(stage, first, end, last, receive, takes, sends)

    def _known_count(
        self, run: StageRun, counts: Sequence[Tensor], index: int, counted: Tensor
    ) -> Tensor:
        if index >= len(counts):
            raise ValueError(
                f"forward computed more means over targets, {index + 1}, than when its targets "
                "were counted: a block computes one, or forward does something else than in its "
                "first call of this form. Compute them in code around the blocks and in every "
                "call, or use pipeline_parallel.size 1"
            )
        if run.is_last:
            self._seen.add(index, counted)
        return counts[index]

    def _look(self, forward: Callable[..., Any], microbatch: Microbatch) -> SeenCall:
        before, settings = {*map(id, self.scalars().values())}, self.settings()
        run = functools.partial(self._run_counting, forward, microbatch)
        seen = seen_call(run, self.starts[-1], self.are_counted)
        seen = replace(seen, settings=changed_settings(settings, self.settings()))
        if seen.has_loss:
            return seen
        kept = (name for name, scalar in self.scalars().items() if id(scalar) not in before)
        return replace(seen, kept=next(kept, ""))

    def _run_counting(
        self,
        forward: Callable[..., Any],
        microbatch: Microbatch,
        mode: TokenCounts | None,
        values: ObservedValues | None = None,
    ) -> Any:
        run = StageRun.counting(self.num_blocks, values)
        with _explained(), run.running(), hooks_where_real(self.staging.around, run):
            return run_counting(forward, microbatch, self.staging, run, self.device_type, mode)[0]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what a stage does not have, where forward does not find something."""
    try:
        yield
    except (AttributeError, IndexError, KeyError) as error:
        error.add_note(
            "In a pipeline, what blocks of other stages or their hooks leave in attributes, lists "
            "or dicts is not there for code of this stage. Return it from the block, add it up "
            "from block to block as an argument, or use pipeline_parallel.size 1."
        )
        raise

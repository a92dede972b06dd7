"""What the token means of a module count, known before any micro-batch is differentiated."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._loss.sum_ratios import SumRatios, ratios_to_count
from vescale_parallel._loss.token_mean import TokenCounts
from vescale_parallel._model.copies import own_containers
from vescale_parallel._pipeline.cuts.placeholders import Placeholder
from vescale_parallel._pipeline.stage_module import StageRun, Staging
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.generators import untouched_generators

from .replay import CountProgram, CountRecorder

# Of one form, tried before forward runs; where shapes depend on values there are many.
_MOST_WAYS = 4
_MOST_FORMS = 64
MicroBatch = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Form:
    """What else than arguments may decide what is counted; see [Note: when counts are replayed].

    Attributes:
        of_model: What forward may look at.
        are_counted: See :class:`.SumRatios`.
    """

    of_model: Hashable
    are_counted: Sequence[bool] = ()

    def ratios(self) -> SumRatios | None:
        """Return what sees such ratios, if there are some."""
        return ratios_to_count(self.are_counted)


@dataclass(eq=False)
class TargetCounts:
    """Counts targets of micro-batches, where possible without running forward.

    Attributes:
        run: Runs forward on a micro-batch, in a mode that sees what it counts.
    """

    run: Callable[[Callable[..., Any], MicroBatch, TokenCounts], object]
    # By the form of a batch: one for each way that forward went; None if it has to run.
    _programs: dict[object, list[CountProgram] | None] = field(
        default_factory=dict[object, "list[CountProgram] | None"]
    )

    def of(self, forward: Callable[..., Any], microbatch: MicroBatch, form: Form) -> list[Tensor]:
        """Return what the token means of forward count in a micro-batch."""
        counts = self.replayed(microbatch, form)
        return self.seen(forward, microbatch, form) if counts is None else counts

    def replayed(self, microbatch: MicroBatch, form: Form) -> list[Tensor] | None:
        """Return the counts without running forward; None if that has to run, to see them."""
        leaves, key = _key_of(microbatch, form)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = (program.counts(given) for program in self._programs.get(key) or ())
        return next((counts for counts in found if counts is not None), None)

    def seen(
        self, forward: Callable[..., Any], microbatch: MicroBatch, form: Form
    ) -> list[Tensor]:
        """Return the counts, and see how they are made unless that was seen before."""
        leaves, key = _key_of(microbatch, form)
        if key not in self._programs and len(self._programs) >= _MOST_FORMS:
            del self._programs[next(iter(self._programs))]
        programs = self._programs.setdefault(key, [] if _are_plain(leaves) else None)
        if programs is None:
            self.run(forward, microbatch, mode := TokenCounts(form.ratios()))
            return mode.counts
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        recorder = CountRecorder(given, form.ratios())
        self.run(forward, microbatch, recorder)
        program = recorder.program()
        if program is None or len(programs) == _MOST_WAYS:
            self._programs[key] = None
        else:
            programs.append(program)
        return recorder.counts

    def has_to_run(self, microbatch: MicroBatch, form: Form) -> bool:
        """Whether forward was seen to make the targets of such batches in no other way."""
        key = _key_of(microbatch, form)[1]
        return self._programs.get(key, []) is None


def _key_of(microbatch: MicroBatch, form: Form) -> tuple[list[Any], Hashable]:
    """Return the leaves of a batch, and what tells it from batches of other forms."""
    leaves, spec = pytree.tree_flatten(microbatch)
    return leaves, (form, spec, *map(functools.partial(_kind, leaves), leaves))


def _kind(leaves: Sequence[Any], leaf: Any) -> Hashable:
    """Return what of an argument may decide how targets are made, values of tensors aside."""
    if isinstance(leaf, Tensor):
        # The same tensor twice may be two in another call.
        first = next(index for index, other in enumerate(leaves) if other is leaf)
        return leaf.shape, leaf.dtype, leaf.device, first
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else type(leaf)


_PLAIN = (bool, int, float, str, type(None))


def _are_plain(leaves: Sequence[Any]) -> bool:
    """Whether nothing may change behind the back of what arguments are told apart by."""
    return all(type(leaf) is Tensor or isinstance(leaf, _PLAIN) for leaf in leaves)


def plain_attributes(model: nn.Module) -> Hashable:
    """Return the numbers, words and flags that the modules of a model hold."""
    held = (value for module in model.modules() for value in vars(module).values())
    return tuple((type(value), value) for value in held if isinstance(value, _PLAIN))


def run_counting(
    forward: Callable[..., Any],
    microbatch: MicroBatch,
    staging: Staging,
    run: StageRun | None,
    device_type: str,
    mode: TokenCounts | None = None,
) -> tuple[Any, list[Tensor]]:
    """Return what forward returns of one micro-batch, and what its token means count.

    Nothing is kept for backward, and nothing is drawn from generators. In ``run`` modules may
    give placeholders; None runs all of the model. ``mode`` is what counts, None a new one.
    """
    mode = TokenCounts() if mode is None else mode
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    args, kwargs = own_containers(microbatch)
    staging.run = run
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), untouched_generators(), mode:
            return forward(*args, **kwargs), mode.counts
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise ValueError(
            "forward differentiates (torch.autograd.grad), and the run that counts targets before "
            "the step is without gradients, as evaluation is; differentiate within "
            "torch.enable_grad(), or use batch.gradient_accumulation 1"
        ) from error
    finally:
        staging.run = None


def check_known(counts: Sequence[Tensor], by: str) -> None:
    """Raise if targets are made from what blocks compute, which runs that count do not have.

    Raises:
        ValueError: If so; ``by`` is who needs counts before anything is computed.
    """
    if not all(map(is_known, counts)):
        raise ValueError(
            f"{by} needs to know how many targets a loss counts, or what else it divides by, "
            "before any part of the batch is differentiated, and here they are made from what "
            "the model computes. Make them from the batch, as a call of the model under "
            "torch.no_grad() before the step does, or use pipeline_parallel.size 1 and "
            "batch.gradient_accumulation 1"
        )


def is_known(count: Tensor) -> bool:
    """Whether a count is of a batch, and of nothing that modules compute."""
    return not isinstance(count, Placeholder) and not count.is_meta


def summed_counts(found: Sequence[Sequence[Tensor]], *, otherwise: str) -> list[Tensor]:
    """Return what each token mean counts in all micro-batches together.

    Raises:
        ValueError: If micro-batches have other numbers of them; ``otherwise`` is what then helps.
    """
    if len({len(counts) for counts in found}) > 1:
        raise ValueError(
            "expected as many token-mean losses in every micro-batch, got "
            f"{[len(counts) for counts in found]}; compute them unconditionally, or use "
            f"{otherwise}"
        )
    # One after the other, as the passes that train add them: sums of weights are rounded.
    return [functools.reduce(operator.add, counts) for counts in zip(*found, strict=True)]

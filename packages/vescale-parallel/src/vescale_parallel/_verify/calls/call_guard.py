"""Numeric equivalence check of a plan when its model is called in a new form.

The check shows that a plan is right for the way that forward takes for one example. An argument
that the example lacks may lead elsewhere: another mask, a second input, a branch. Sizes may not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from vescale_parallel._model.blocks import numel_of
from vescale_parallel._model.copies import copied_without_values, plain
from vescale_parallel._model.experts_implementation import experts_without_values
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._tensor_parallel.hooks.axis import HookedCall
from vescale_parallel._tensor_parallel.hooks.whole_activations import KeptLayouts, Layouts
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding, shard
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.dry_run import DryRunError
from vescale_parallel._verify.dry_runs import DryRuns, dry_runs_of_few
from vescale_parallel._verify.equivalence import MAX_NUMEL, NOT_REACHED, Contradiction, check_plan
from vescale_parallel._verify.plan_of_scaled_down import plan_of_scaled_down
from vescale_parallel._verify.region import Region
from vescale_parallel._verify.scaled_down_model import is_large, scaled_down
from vescale_parallel._verify.threads import in_fresh_thread
from vescale_parallel._verify.whole_model import whole_region

from .call_signature import CallForms
from .flags import ChangedFlags, Flags
from .kept_by_forward import kept_layouts
from .seen_by_hooks import layouts_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Finds(Protocol[T_co]):
    """Finds something by running a model, made by a function, whole and sharded."""

    def __call__(
        self, make: Callable[[], Region], sharding: TensorSharding, *, real: TensorSharding
    ) -> T_co: ...


class CallGuard:
    """Knows the forms of call that a plan was proven for, and proves it for others.

    A model that cannot be copied, and so was never checked, is not guarded. ``sharding`` is the
    plan for this model, with what a check has added to it; ``proven`` are forms that need none.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding_plan: Mapping[str, str],
        sharding: TensorSharding,
        proven: Iterable[str],
    ) -> None:
        self._forms, self._flags = CallForms(model), ChangedFlags(model)
        self._proven: set[tuple[str, Flags]] = {(form, ()) for form in proven}
        self._sharding_plan, self._sharding = dict(sharding_plan), sharding
        self._whole, self._class = copied_without_values(model), type(model).__name__
        is_cut = bool(sharding.spec.parameters or sharding.spec.shared)
        self._runs: dict[object, Any] = {}
        self._needs_proof = is_cut and self._whole is not None

    @contextlib.contextmanager
    def proven(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Compare the plan with one device for a call of a new form, and run the call inside.

        Raises:
            ValueError: With the module that the plan has compute something else.
        """
        if not self._needs_proof:
            yield
            return
        form, flags = self._forms.form(args, kwargs), self._flags.of(model)
        if (form, flags) in self._proven:
            yield
            return
        doubt = self._doubt(model, _told_with(form, flags), args, kwargs)
        yield
        # Not of a call that has raised: it could not be proven for the same reason.
        self._proven.add((form, flags))
        if doubt is not None:
            warn_at_user_line(
                f"the sharding plan was not compared with one device for calls with ({form}), "
                f"and cannot be: "
                f"{doubt}",
            )

    def _doubt(
        self, model: nn.Module, form: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str | None:
        """Return why there is no proof; raise if the plan is wrong."""
        given = self._on_cpu(args, kwargs)
        assert self._whole is not None
        try:
            return in_fresh_thread(lambda: self._check(model, given), of=self._whole)
        except Contradiction as error:
            raise ValueError(
                f"the sharding plan was made for other calls, and is wrong for those with "
                f"({form}): in {self._told(error.fqn)}, {error.why}. Make a plan with such a call "
                "as example_batch, and call the model in no other form"
            ) from error
        except DryRunError as error:
            return str(error)

    def _told(self, fqn: str) -> str:
        return repr(fqn) if fqn else f"{self._class} itself"

    def layouts(self, call: HookedCall) -> Layouts:
        """Return how what hooks of modules are given lies over ranks, in calls of this form."""
        find: _Finds[Layouts] = functools.partial(
            layouts_of, fqns=call.fqns, backward=call.backward
        )
        what = "hooks", call.fqns, call.backward
        return self._found(what, call.model, call.args, call.kwargs, find) or {}

    def kept(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> KeptLayouts | None:
        """Return how what forward keeps in attributes lies over ranks, of what is not whole.

        None if it could not be found.

        Args:
            model: As it is now.
            args: Of the call.
            kwargs: Of the call.
        """
        return self._found("kept", model, args, kwargs, kept_layouts)

    def _found(
        self,
        what: object,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        find: _Finds[T],
    ) -> T | None:
        """Return what is found once by running a call of this form; None if it cannot be run."""
        whole = self._whole
        if whole is None:
            return None
        key = what, self._forms.form(args, kwargs), self._flags.of(model), model.training
        if key not in self._runs:
            batch = self._on_cpu(args, kwargs)

            def run() -> T | None:
                subject, sharding = self._subject(model)
                if numel_of(subject) > MAX_NUMEL:
                    return None
                few = dry_runs_of_few(subject, batch).batch
                region = functools.partial(whole_region, subject, few, {}, training=model.training)
                return find(region, sharding, real=self._sharding)

            try:
                self._runs[key] = in_fresh_thread(run, of=whole)
            except (Contradiction, DryRunError):
                self._runs[key] = None
        return self._runs[key]

    def _on_cpu(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        batch = self._forms.batch(args, kwargs)
        return pytree.tree_map_only(Tensor, lambda x: plain(x).cpu(), batch)

    def _subject(self, model: nn.Module) -> tuple[nn.Module, TensorSharding]:
        """Return what is run for a model, as its modules are now, and how it is sharded."""
        subject, sharding = self._whole, self._sharding
        assert subject is not None
        if is_large(subject):
            scaled = scaled_down(subject, sharding.size, shorter=False)
            smaller = None if scaled is None else self._sharding_of(scaled)
            if scaled is not None and smaller is not None:
                subject, sharding = scaled, smaller
        self._flags.put_on(subject, model)
        return subject, sharding

    def _check(self, model: nn.Module, batch: Any) -> str | None:
        subject, sharding = self._subject(model)
        runs = dry_runs_of_few(subject, batch)
        needs_values = _needs_values(runs)
        # Values decide what is run: right for these ones may be wrong for others, unless all that
        # they decide is which experts run.
        doubt = "" if needs_values and _choose_experts(subject, runs.batch) else needs_values
        result = check_plan(runs, sharding, needs_values=bool(needs_values))
        marked = frozenset(sharding.spec.grads)
        for fqn in sorted((result.partial_grads - marked) | (result.whole_grads & marked)):
            raise Contradiction(
                fqn, "the gradient is a sum over ranks in some forms of call and not in others"
            )
        # What results do not depend on in this form of call cannot make them wrong.
        doubts = {fqn: why for fqn, why in result.unchecked.items() if why != NOT_REACHED}
        reasons = (f"{fqn} was not compared: {why}" for fqn, why in doubts.items())
        too_large = (f"{fqn} is too large to be run" for fqn in result.too_large)
        return doubt or next(itertools.chain(reasons, too_large), None)

    def _sharding_of(self, scaled: nn.Module) -> TensorSharding | None:
        """Return that of a scaled-down model, None if the plan names blocks that it lacks."""
        assert self._whole is not None
        try:
            plan = plan_of_scaled_down(self._sharding_plan, self._whole, scaled)
            return shard(plan, scaled, self._sharding.size)
        except ValueError:
            return None


def _told_with(form: str, flags: Flags) -> str:
    set_to = [f"{fqn}.{name} {value!r}".lstrip(".") for fqn, name, value in flags]
    return ", ".join([*([form] if form else []), *set_to[:3], *(["..."] if set_to[3:] else [])])


def _needs_values(runs: DryRuns) -> str:
    """Return where a forward asks for values, empty if it runs on shapes alone."""
    try:
        runs.blocks()
    except DryRunError as error:
        return str(error)
    return ""


def _choose_experts(model: nn.Module, batch: Any) -> bool:
    """Whether a forward asks for values only to loop over the experts that have tokens."""
    with experts_without_values(model) as has_experts:
        return has_experts and not _needs_values(DryRuns(model, batch))

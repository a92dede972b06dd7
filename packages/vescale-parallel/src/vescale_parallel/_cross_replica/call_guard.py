"""Know where rows of the batch meet in every form of call of a model, before it runs in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_parallel._model.copies import copied_without_hooks, tensors_within
from vescale_parallel._model.inputs import common_length, some_that_count
from vescale_parallel._model.random_copies import random_copy
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.call_signature import CallForms
from vescale_parallel._verify.equivalence import MAX_NUMEL
from vescale_parallel._verify.scaled_down_model import scaled_down
from vescale_parallel._verify.threads import in_fresh_thread

from .borders import (
    NOWHERE,
    RowMeetings,
    is_one_a_row,
    joined,
    row_counts,
    row_dim,
)
from .check import (
    CannotRunError,
    Given,
    RowCheckError,
    UnclearRowsError,
    row_meetings,
)
from .parts import NUM_ROWS
from .runs import seeded

# Parameters above which a scaled-down model is looked at, if there is one: a second or less.
_MANY = 2**22
# Numbers of rows that are tried where more than one dim may be the rows.
_MOST_GUESSES = 3


class RowGuard:
    """Finds out, once for each form of call, where rows of the batch meet.

    Args:
        model: Still whole; what a check needs of it is copied.
        exchange: Returns what every rank that shares a batch has for a value.
        losses_only: Whether, in training, numbers that have no gradient do not matter.

    Attributes:
        is_rows_first: Whether rows are known to be the first dim of a call's tensors, as of a
            batch that a loader of this package gave.
        whole: A copy of the model without values; None if it cannot be copied.
        latest: The form of the latest call; None before the first one.
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: Callable[[Any], list[Any]],
        *,
        losses_only: bool = False,
    ) -> None:
        self._exchange, self._losses_only = exchange, losses_only
        self._skips_numbers = losses_only
        self._forms = CallForms(model)
        self.whole = _copy_without_values(model)
        self._known: dict[tuple[str, int], RowMeetings] = {}
        self._trained: dict[str, RowMeetings] = {}
        self._unchecked: set[tuple[str, int]] = set()
        self.latest: tuple[str, int] | None = None
        self.is_rows_first: Callable[[Any], bool] = lambda tree: False

    def meetings(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[RowMeetings, bool]:
        """Return where rows meet in a call, and whether that could be checked.

        Every rank that shares the batch must call this, unless gradients are off and rows do not
        meet: in a form of call that is new they tell each other where, since that may depend on
        values.

        Raises:
            ValueError: If ranks are called in different forms.
        """
        key = self.latest = self.key(model, args, kwargs)
        is_new = key not in self._known and not torch.is_grad_enabled()
        # In training other things matter, if only losses do.
        if is_new and not self._losses_only and key[0] in self._trained:
            # Where all ranks agreed that rows meet in training they may meet now.
            self._known[key] = self._trained[key[0]]
        if key not in self._known:
            self._known[key] = self._find(key, model, args, kwargs)
        if torch.is_grad_enabled():
            self._trained[key[0]] = self._known[key]
        return self._known[key], key not in self._unchecked

    def key(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Return what tells the forms of call apart."""
        modes = [module.training for module in model.modules()]
        return self._forms.form(args, kwargs), hash((torch.is_grad_enabled(), *modes))

    def _find(
        self,
        key: tuple[str, int],
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> RowMeetings:
        given = pytree.tree_map_only(Tensor, plain, (tuple(args), dict(kwargs)))
        is_rows_first = self.is_rows_first((args, kwargs))
        found, why, is_wrong = NOWHERE, "", False
        self._skips_numbers = self._losses_only and torch.is_grad_enabled()
        try:
            found = in_fresh_thread(lambda: self._check(model, given, is_rows_first=is_rows_first))
        except RowCheckError as error:
            why, is_wrong = str(error), not isinstance(error, CannotRunError)
        if not found.regions and not torch.is_grad_enabled():
            return found  # without a word to others: one rank may evaluate alone
        ranks = self._exchange((key[0], found, why, is_wrong))
        forms = {form for form, *_ in ranks}
        if len(forms) > 1:
            raise ValueError(
                f"expected ranks that share a batch to call the model alike, got {sorted(forms)}"
            )
        refusals = [each for _, _, each, is_wrong in ranks if is_wrong]
        if refusals:
            raise ValueError(refusals[0])
        doubts = [each for _, _, each, _ in ranks if each]
        if doubts:
            self._unchecked.add(key)
            warn_at_user_line(
                "it could not be checked whether rows of the batch depend on each other in this "
                "call, which data-parallel ranks would then compute from their own rows only: "
                f"{doubts[0]}"
            )
        return joined([each for _, each, *_ in ranks])

    def _check(self, model: nn.Module, given: Given, *, is_rows_first: bool) -> RowMeetings:
        if any(_holds_rows(leaf) for leaf in pytree.tree_leaves(given)):
            raise CannotRunError("an object is given that holds tensors, a cache for example")
        subject, is_scaled_down = self.subject(model)
        counts = row_counts(*given)
        if not counts:
            raise CannotRunError("no tensor is given that has rows")
        firsts = {x.shape[0] for x in pytree.tree_leaves(given) if _has_dims(x)}
        if is_rows_first and len(firsts) == 1:
            counts = [*firsts]
        shared = [_sharing(given, count) for count in counts]
        counts = [c for c, n in zip(counts, shared, strict=True) if n == shared[0]]
        found: dict[int, RowMeetings] = {}
        errors: list[CannotRunError] = []
        for num_rows in counts[:_MOST_GUESSES]:
            try:
                found[num_rows] = self._meetings_of(subject, given, num_rows, is_scaled_down)
            except CannotRunError as error:
                errors.append(error)
                continue
            # Steps of time, taken for rows, meet; rows mostly do not.
            if not found[num_rows].regions:
                break
        if not found:
            raise errors[0]
        first, *_, last = [*found, *found]
        if len(firsts) == 1 and last != first and not found[last].regions:
            raise UnclearRowsError(_unclear(found[first], first, last))
        chosen = last if not found[last].regions else first
        alike = self._of_rows_alike(subject, given, chosen, is_scaled_down)
        return _with_regions_of(found[chosen], alike)

    def _of_rows_alike(
        self, subject: nn.Module, given: Given, num_rows: int, is_scaled_down: bool
    ) -> RowMeetings:
        """Return where rows meet if those of one part have what no row of another one has.

        A loss without a single target that counts, for example, may be computed otherwise.
        """
        last = largest_table(subject) - 1
        for larger in (_twice, lambda value: value.clamp(min=last), lambda value: value):
            batches = some_rows(given, num_rows, uneven=False, alike=_Extremes(larger))
            if is_scaled_down:
                batches = pytree.tree_map_only(Tensor, within(subject), batches)
            whole, *halves = batches
            try:
                found = row_meetings(subject, whole, halves, losses_only=self._skips_numbers)
            except CannotRunError:
                continue  # such rows need not fit the model
            return found.as_patterns() if is_scaled_down else found
        return NOWHERE

    def _meetings_of(
        self, subject: nn.Module, given: Given, num_rows: int, is_scaled_down: bool
    ) -> RowMeetings:
        errors: list[CannotRunError] = []
        for uneven in (True, False):
            whole, *halves = some_rows(given, num_rows, uneven=uneven)
            if is_scaled_down:
                inside = within(subject)
                whole, *halves = pytree.tree_map_only(Tensor, inside, [whole, *halves])
            try:
                found = row_meetings(subject, whole, halves, losses_only=self._skips_numbers)
            except CannotRunError as error:
                errors.append(error)
                continue
            return found.as_patterns() if is_scaled_down else found
        raise errors[-1]

    def subject(self, model: nn.Module) -> tuple[nn.Module, bool]:
        """Return what to run: the model with random values, or a scaled-down one."""
        whole = self.whole
        if whole is None:
            raise CannotRunError(f"{type(model).__name__} cannot be copied")
        numel = sum(p.numel() for p in whole.parameters())
        scaled = scaled_down(whole, 1) if numel > _MANY else None
        if scaled is None and numel > MAX_NUMEL:
            raise CannotRunError(
                f"{type(model).__name__} has {numel} parameters, more than the {MAX_NUMEL} that "
                "are run to see, and no configuration to make a smaller one by"
            )
        with seeded():
            subject = random_copy(whole if scaled is None else scaled)
        if scaled is not None:
            return subject.train(model.training), True
        live = dict(model.named_modules())
        for fqn, module in subject.named_modules():
            module.training = live[fqn].training
            for name, buffer in live[fqn].named_buffers(recurse=False):
                if type(buffer) in (Tensor, nn.Buffer) and buffer.device.type != "meta":
                    module._buffers[name] = _in_double(buffer)
        for parameter in subject.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return subject, False


def _twice(value: Tensor) -> Tensor:
    return 2 * value.clamp(min=0) + 2


def _with_regions_of(found: RowMeetings, other: RowMeetings) -> RowMeetings:
    """Return where rows meet in either; where they lie, the first one knows better."""
    if not other.regions:
        return found
    borders = {at: each for at, each in other.borders.items() if at not in found.borders}
    return joined(
        [found, replace(other, borders=borders, given=found.given, returned=found.returned)]
    )


def _unclear(found: RowMeetings, first: int, other: int) -> str:
    names = ", ".join(f"{fqn or 'the model'!r} ({why})" for fqn, why in found.regions.items())
    return (
        "it cannot be told which dim of a call's tensors the rows of the batch are: if the first, "
        f"of length {first}, they depend on each other in {names}; if the one of length {other}, "
        "nowhere. Give parallelize the data set, whose batches have rows first, or call the model "
        "with tensors that only share the rows, targets of (batch) for example; or use "
        "data_parallel.size 1"
    )


def _copy_without_values(model: nn.Module) -> nn.Module | None:
    def empty(parameter: nn.Parameter) -> nn.Parameter:
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return nn.Parameter(data, parameter.requires_grad)

    try:
        return copied_without_hooks(model, empty, lambda buffer: buffer)
    # Arbitrary attributes of a user's modules: locks, files, process groups.
    except Exception:
        return None


def plain(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach()


def _in_double(tensor: Tensor) -> Tensor:
    real = tensor.detach().cpu().clone()
    return real.double() if real.is_floating_point() else real


def within(model: nn.Module) -> Any:
    """Return what brings token ids into a smaller vocabulary."""
    limit = largest_table(model)

    def inside(x: Tensor) -> Tensor:
        is_index = not x.is_floating_point() and x.dtype != torch.bool and limit > 0
        return torch.where(x >= limit, x % limit, x) if is_index else x

    return inside


def largest_table(model: nn.Module) -> int:
    """Return how many rows the largest embedding has."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return max(tables, default=0)


def _has_dims(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.dim() > 0


def _holds_rows(leaf: object) -> bool:
    """Whether an argument, not a tensor itself, holds some: they cannot be made fewer rows."""
    if isinstance(leaf, Tensor | Mapping):
        return False  # a mapping is opened
    return any(x.numel() for x in tensors_within(leaf))


def _sharing(given: Given, count: int) -> int:
    leaves = pytree.tree_leaves(given)
    return sum(count in x.shape for x in leaves if isinstance(x, Tensor))


@dataclass(frozen=True)
class _Extremes:
    """Integers that no row of a half shares with the other one.

    Attributes:
        larger: Of a tensor that has one value only, of one row of one token for example, the
            value of the second half. It need not be an index of what the model looks up.
    """

    larger: Callable[[Tensor], Tensor]

    def fill(self, rows: Tensor) -> None:
        """Give the first half of rows the least integer, the second half the largest."""
        if rows.is_floating_point() or rows.is_complex() or not rows.numel():
            return
        least, largest = rows.amin(), rows.amax()
        if least == largest and not _is_mask(rows):
            # 0 is an index of everything that has any. A mask that keeps all stays one.
            least = least.clamp(max=0)
            largest = self.larger(largest)
        rows[: NUM_ROWS // 2] = least
        rows[NUM_ROWS // 2 :] = largest


def some_rows(
    given: Given, num_rows: int, *, uneven: bool, alike: _Extremes | None = None
) -> list[Given]:
    """Return small batches: one of as many rows as a check takes, and both halves of it.

    Args:
        given: Positional and keyword arguments, with ``num_rows`` rows.
        num_rows: What tells which dim the rows are along.
        uneven: Whether to have masks keep another number of positions of every row: whoever
            counts them must not be taken for somebody who does not.
        alike: Has all integers of the first half of the rows be alike, and those of the second.
    """
    half = NUM_ROWS // 2
    kept = (slice(0, NUM_ROWS), slice(0, half), slice(half, NUM_ROWS))
    return [_some_rows(given, num_rows, rows, uneven=uneven, alike=alike) for rows in kept]


def _some_rows(
    given: Given, num_rows: int, rows: slice, *, uneven: bool, alike: _Extremes | None
) -> Given:
    generator = torch.Generator().manual_seed(0)
    length = common_length(given, num_rows)

    def some(value: Any) -> Any:
        if isinstance(value, Tensor):
            dim, real = row_dim(value, num_rows), _in_double(value)
            if dim is None:
                return real
            grown = _grown(real.movedim(dim, 0), generator, length, uneven=uneven)
            if alike is not None:
                alike.fill(grown)
            return grown[rows].movedim(0, dim).contiguous()
        if isinstance(value, Mapping):
            return {key: some(each) for key, each in value.items()}
        if type(value) not in (list, tuple):
            return value
        if is_one_a_row(value, num_rows):
            chosen = [_plain_tree(value[i % num_rows]) for i in range(NUM_ROWS)]
            return type(value)(chosen[rows])
        return type(value)(map(some, value))

    args, kwargs = given
    return tuple(map(some, args)), {name: some(value) for name, value in kwargs.items()}


def _plain_tree(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, _in_double, tree)


def _grown(x: Tensor, generator: torch.Generator, length: int | None, *, uneven: bool) -> Tensor:
    """Return as many rows as a check takes, made different where there were fewer."""
    if length is not None and x.dim() == 2:
        x = x[:, :length]
    rows = [x[i % len(x)] for i in range(NUM_ROWS)]
    for i in range(len(x), NUM_ROWS):
        if x.is_floating_point() and not _is_mask(x):
            noise = torch.rand(rows[i].shape, generator=generator, dtype=x.dtype)
            rows[i] = rows[i] * (1 + 0.1 * noise)
        elif rows[i].dim():
            rows[i] = rows[i].roll(i, -1)
    made = some_that_count(torch.stack(rows))
    return _thinned(made) if uneven and _is_mask(x) and made.dim() > 1 else made


def _is_mask(x: Tensor) -> bool:
    return x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all())


def _thinned(mask: Tensor) -> Tensor:
    """Clear the ends of rows, of each one another number of positions."""
    length = math.prod(mask.shape[1:])
    flat = mask.clone().reshape(len(mask), length)
    for i, row in enumerate(flat):
        row[length - (i * length) // (2 * NUM_ROWS) :] = 0
    return flat.view(mask.shape)

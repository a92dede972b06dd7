"""Counts of targets from a batch alone, by the functions that forward was seen to call on it.

[Note: when counts are replayed] In a run that counts targets every torch function is seen. Those
on tensors of the batch, and on what was made from these and from nothing else, are a program: the
ones that targets depend on can be called again for another batch of the same form, without the
code of modules in between. That is not so, and forward runs to count, if targets depend on any
other tensor or on random numbers, if the batch is written to, or if code asks for the values of
any other tensor, by which it may decide what to do. Of those of the program numbers may be asked:
the questions are asked again. Answers are those that were given and results have the shapes that
they had, or forward runs and is another program. What code decides by values that no tensor has (a
counter in Python) is not seen; the pass that trains counts as well, and a difference is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._loss.sum_ratios import SumRatios
from vescale_parallel._loss.token_mean import TokenCounts, TokenMean, token_mean_of
from vescale_parallel._loss.totals import Total
from vescale_parallel._model.shape_questions import SHAPE_QUESTIONS
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.generators import generator_state


@dataclass(frozen=True)
class _Value:
    """A place in the list of a program's tensors."""

    index: int


@dataclass(frozen=True)
class _Call:
    """A function that was called on tensors of a program.

    Attributes:
        func: The function.
        leaves: Of its arguments, with places for tensors.
        spec: Of its arguments.
        results: Place, shape and dtype of every tensor among its results; no place for those that
            have one already.
        draws: Whether it drew random numbers.
        answer: The number that it gave to Python; None of tensors.
    """

    func: Callable[..., Any]
    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    results: Sequence[tuple[int | None, torch.Size, torch.dtype]]
    draws: bool
    answer: float | None = None

    @property
    def needs(self) -> set[int]:
        return {leaf.index for leaf in self.leaves if isinstance(leaf, _Value)}

    @property
    def gives(self) -> set[int]:
        return {index for index, _, _ in self.results if index is not None}

    def again(self, values: dict[int, Tensor]) -> bool:
        """Call the function, and keep its results; False if they have other shapes or values."""
        filled = [values[leaf.index] if isinstance(leaf, _Value) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        result = self.func(*args, **kwargs)
        if self.answer is not None:
            return result == self.answer
        found = _tensors_in(result)
        for (index, shape, dtype), tensor in zip(self.results, found, strict=True):
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                return False
            if index is not None:
                values[index] = tensor
        return True


@dataclass(frozen=True)
class _Targets:
    """Places of the targets and weights of a mean, and the target that does not count."""

    target: int
    weight: int | None
    ignored: int

    @property
    def needs(self) -> set[int]:
        return {self.target} if self.weight is None else {self.target, self.weight}

    def count(self, values: Mapping[int, Tensor]) -> Tensor:
        target = values[self.target]
        weight = None if self.weight is None else values[self.weight]
        return TokenMean(target, target, weight, ignore_index=self.ignored).counted()


@dataclass(frozen=True)
class _Sum:
    """Place of what sums to a divisor, and how many items that is the mean of, or 1."""

    place: int
    num_items: int

    @property
    def needs(self) -> set[int]:
        return {self.place}

    def count(self, values: Mapping[int, Tensor]) -> Tensor:
        return values[self.place].sum(dtype=torch.float64) * self.num_items


_Counted = _Targets | _Sum


@dataclass(frozen=True)
class CountProgram:
    """Computes what token means count.

    Attributes:
        calls: In order.
        means: What is counted, in order.
    """

    calls: Sequence[_Call]
    means: Sequence[_Counted]

    def counts(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the counts for the tensors of a batch, None if they have to be seen again."""
        values = dict(enumerate(given))
        with torch.no_grad():
            if not all(call.again(values) for call in self.calls):
                return None
            return [mean.count(values) for mean in self.means]


class CountRecorder(TokenCounts):
    """Counts targets, and notes how they are made from ``given``, the tensors of a batch.

    Attributes:
        refusal: Why they cannot be made without running forward; None if they can.
    """

    def __init__(self, given: Sequence[Tensor], ratios: SumRatios | None = None) -> None:
        super().__init__(ratios)
        self.refusal: str | None = None
        if torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in given):
            self.refusal = "tensors of inference mode do not tell of writes"
            given = ()
        # All are kept, so that no other tensor gets the id of one.
        self._values = list(given)
        self._places = {id(tensor): index for index, tensor in enumerate(given)}
        self._versions = [tensor._version for tensor in given]
        self._num_given = len(given)
        self._calls: list[_Call] = []
        self._means: list[_Counted] = []
        self._writes = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if self.refusal is not None:
            return super().__torch_function__(func, types, args, given)
        mean = token_mean_of(func, args, given)
        if mean is not None:
            self._note_mean(mean)
            return super().__torch_function__(func, types, args, given)
        leaves, spec = pytree.tree_flatten((tuple(args), dict(given)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = [self._place(tensor) for tensor in tensors]
        known = None not in places
        self._look_for_writes(known=False)
        before = generator_state() if known else None
        result = super().__torch_function__(func, types, args, given)
        found = _tensors_in(result)
        is_question = bool(tensors) and not found and func not in SHAPE_QUESTIONS
        is_answered = isinstance(result, bool | int | float)
        if is_question and result is not None and not (known and is_answered):
            self.refusal = f"{func} gives values of a tensor to Python"
        self._look_for_writes(known)
        if known and (found or result is None or (is_question and is_answered)):
            leaves = [
                _Value(self._places[id(leaf)]) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
            results = [(self._new_place(x), x.shape, x.dtype) for x in found]
            draws = before != generator_state()
            answer = result if is_question and is_answered else None
            self._calls.append(_Call(func, leaves, spec, results, draws, answer))
        return result

    def program(self) -> CountProgram | None:
        """Return how to count in another batch of this form; None if forward has to run."""
        if self.refusal is None:
            self._look_for_writes(known=False)
        calls = self._calls
        if not self._writes:
            calls = self._without_constants(calls)
            calls = _needed(calls, {x for mean in self._means for x in mean.needs})
        if any(call.draws for call in calls):
            self.refusal = "targets are drawn"
        return None if self.refusal else CountProgram(calls, self._means)

    def _without_constants(self, calls: Sequence[_Call]) -> list[_Call]:
        """Return the calls without questions about tensors that no batch is in, as positions."""
        of_batch = set(range(self._num_given))
        kept: list[_Call] = []
        for call in calls:
            if call.draws or call.needs & of_batch:
                of_batch |= call.gives
            if call.answer is None or call.needs & of_batch:
                kept.append(call)
        return kept

    def _place(self, tensor: Tensor) -> int | None:
        return self._places.get(id(tensor))

    def _new_place(self, tensor: Tensor) -> int | None:
        if id(tensor) in self._places:
            return None
        self._places[id(tensor)] = len(self._values)
        self._values.append(tensor)
        self._versions.append(tensor._version)
        return len(self._values) - 1

    def _look_for_writes(self, known: bool) -> None:
        """Refuse writes to the batch, and what is not in the program to write to its tensors."""
        now = [tensor._version for tensor in self._values]
        if now == self._versions:
            return
        if not known:
            self.refusal = "targets are written to by what is not made from the batch"
        if now[: self._num_given] != self._versions[: self._num_given]:
            self.refusal = "forward writes to the batch"
        self._writes, self._versions = True, now

    def note_sum(self, divisor: Total) -> None:
        super().note_sum(divisor)
        place = self._place(divisor.value)
        if place is None:
            self.refusal = "what divides a sum is not made from the batch alone"
        else:
            self._means.append(_Sum(place, divisor.num_items))

    def _note_mean(self, mean: TokenMean) -> None:
        target = self._place(mean.target)
        weight = None if mean.weight is None else self._place(mean.weight)
        if target is None or (weight is None and mean.weight is not None):
            self.refusal = "targets are not made from the batch alone"
        else:
            self._means.append(_Targets(target, weight, mean.ignore_index))


def _needed(calls: Sequence[_Call], wanted: set[int]) -> list[_Call]:
    """Return the calls, none of which writes, that some results depend on, and all questions."""
    found: list[_Call] = []
    for call in reversed(calls):
        if call.answer is not None or call.gives & wanted:
            wanted |= call.needs
            found.insert(0, call)
    return found


def _tensors_in(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

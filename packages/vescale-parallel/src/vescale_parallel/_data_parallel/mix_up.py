"""Find ranks that exchange parameters or gradients of different groups with each other.

[Note: mixed-up ranks] Collectives pair by order alone, so ranks that run other blocks get each
other's parameters; gloo ends the process where sizes differ, NCCL waits. What has to agree is the
order in which exchanges are started: when a rank waits for one is its own business. Once a step,
before anybody sees a gradient, ranks compare a digest of their order. An order that was compared
is known, and costs nothing from then on.

A rank that comes to an exchange which no known order has next may be the only one. So it asks
before it begins, and goes on once all ranks ask for the same. Ranks that began something else wait
for it in a collective, look for questions meanwhile, and refuse. They leave that collective
then, so that the process group is of no more use. On a GPU the host does not wait in a collective,
and so does not answer: whoever asks gives up after the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import all_gather, while_waiting

from .order_questions import OrderQuestions, OthersDiffer

# What is exchanged besides groups of parameters, whose numbers come after these.
END_OF_BACKWARD, END_OF_FORWARD = 0, 1
_NUM_OTHERS = 2

_NBYTES = 8  # of a digest, and of a token
# Orders of steps that are known at most: of a program that draws which blocks it runs all are new.
MAX_ORDERS = 256


def gather_of(group: int, *, again: bool = False) -> int:
    """Return the number of a gather of a group's parameters.

    One that is done again, as parameters were written while it was under way, is another: on a
    rank that alone wrote some it would pass for the next one of the same group.
    """
    return _NUM_OTHERS + 3 * group + (2 if again else 0)


def reduction_of(group: int) -> int:
    """Return the number of a reduction of a group's gradients."""
    return _NUM_OTHERS + 3 * group + 1


class Exchanges:
    """The groups of parameters that this rank exchanges, in order; see [Note: mixed-up ranks].

    Attributes:
        with_gathers: Whether the order of gathers is that of a program's blocks.
        with_reductions: Whether that of reductions is.
    """

    def __init__(self) -> None:
        self.with_gathers = self.with_reductions = False
        # Since ranks compared last: what came before each exchange, hashed, and its number.
        self._done: list[tuple[int, int]] = []
        self._digest = self._before = 0
        self._next: dict[int, set[int]] = {}
        self._orders: set[int] = set()
        # Names this among the models of a program: that of the first rank is taken over.
        self._token = secrets.token_bytes(_NBYTES)
        self._questions: dict[dist.ProcessGroup, OrderQuestions] = {}
        self._answers = False

    def begin_forward(self) -> None:
        """Note that a forward pass begins: what comes next does not depend on what was before."""
        self._before = 0

    def begin(self, number: int, *groups: dist.ProcessGroup | None) -> None:
        """Note an exchange that comes now.

        Args:
            number: Tells it from others.
            groups: Over which ranks, one group after the other; None for this rank alone.

        Raises:
            ValueError: If ranks of a group came to different ones.
        """
        if torch.compiler.is_compiling():
            return
        questions = [self._questions[each] for each in groups if each in self._questions]
        if questions and number not in self._next.get(self._before, ()):
            with self._telling_which():
                for each in questions:
                    each.ask(number)
            self._learn(self._before, number)
        for each in questions:
            each.begin()
        self._done.append((self._before, number))
        self._before = hash((self._before, number))
        self._digest = hash((self._digest, number))

    def forget(self) -> None:
        """Forget the order of passes that failed."""
        self._done.clear()
        self._digest = self._before = 0

    def bytes_to_compare(self) -> Tensor:
        """Return bytes that tell this order from others."""
        digest = self._digest.to_bytes(_NBYTES, signed=True)
        return torch.tensor([*digest, *self._token], dtype=torch.uint8)

    def compare(self, group: dist.ProcessGroup, everyones: Tensor) -> None:
        """Raise if the order of other ranks is another one.

        Args:
            group: The ranks that exchanged with each other. All of them must call this.
            everyones: Their bytes, (ranks, bytes).
        """
        digests = everyones[:, :_NBYTES]
        if not torch.equal(digests, digests[:1].expand_as(digests)):
            self._raise_first_difference(group, digests.device)
        if group not in self._questions:
            self._token = bytes(everyones[0, _NBYTES:].tolist())
            self._questions[group] = OrderQuestions(group, self._token)
            if not self._answers:
                self._answers = True
                while_waiting(self._answer)

    def end(self, *, of_step: bool) -> None:
        """Know the order since the last call, which all ranks have compared.

        Args:
            of_step: Whether these were all data-parallel ranks, and not those of one copy alone.
        """
        if of_step:
            self._orders.add(self._digest)
        if len(self._orders) > MAX_ORDERS:
            # On all ranks in the same step, or some would ask and others not.
            self._orders, self._next = {self._digest}, {}
        for before, number in self._done:
            self._learn(before, number)
        self.forget()

    def _learn(self, before: int, number: int) -> None:
        self._next.setdefault(before, set()).add(number)

    def _raise_first_difference(self, group: dist.ProcessGroup, device: torch.device) -> None:
        numbers = [number for _, number in self._done]
        count = torch.tensor([len(numbers)], device=device)
        most = int(all_gather(count, group).max())
        padded = torch.tensor([*numbers, *[-1] * (most - len(numbers))], device=device)
        rows = all_gather(padded, group)
        first = int((rows != rows[:1]).any(0).int().argmax())
        tags, ranks = rows[:, first].tolist(), dist.get_process_group_ranks(group)
        own = tags[dist.get_rank(group)]
        self.forget()
        # Ranks began different numbers of exchanges.
        self._questions, self._token = {}, secrets.token_bytes(_NBYTES)
        raise _mixed_up([rank for rank, tag in zip(ranks, tags, strict=True) if tag != own])

    def _answer(self) -> None:
        with self._telling_which():
            for each in self._questions.values():
                each.answer()

    @contextlib.contextmanager
    def _telling_which(self) -> Iterator[None]:
        try:
            yield
        except OthersDiffer as differs:
            self.forget()
            own = dist.get_rank()
            raise _mixed_up([rank for rank in differs.ranks if rank != own]) from None


def _mixed_up(others: Sequence[int]) -> ValueError:
    """Return what to raise where this rank and others exchanged different groups."""
    return ValueError(
        f"data-parallel ranks ran different blocks of the model at the same time (rank "
        f"{dist.get_rank()} another one than {_ranks(others)}), so "
        "parameters got mixed up; with ZeRO stages 2 and 3 control flow must not "
        "depend on this rank's data: every rank runs the same blocks, as often, and in forward "
        "writes the same parameters. Use data_parallel.zero_stage 1"
    )


def _ranks(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {few}"

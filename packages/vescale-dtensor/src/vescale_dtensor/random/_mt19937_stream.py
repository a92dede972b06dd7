"""Where is a CPU generator, and what is its state at any other place of its stream?

A :class:`Stream` is the infinite sequence of 32-bit words a generator draws from one state on; a
:class:`Point` is a place in it. Points are cheap; the state of a point is computed when somebody
draws there, by discarding draws or by jumping, whichever is less work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._mt19937_jump import NUM_WORDS, SEQUENCE_NUMEL, advance, untempered
from ._skip_ahead import discard

# torch.Generator.get_state(), 5056 bytes: u64 seed; i32 left, seeded; u64 next, words[624];
# then what the serial normal distribution keeps: the second value of its last pair.
_LEFT = slice(8, 12)
_NEXT = slice(16, 24)
_WORDS = slice(24, 24 + 8 * NUM_WORDS)
_SPARE = slice(_WORDS.stop, None)
_SPARE_IS_VALID = slice(_WORDS.stop + 24, _WORDS.stop + 28)

# Draws that take about as long as a jump; see [Note: cost of a jump] in _mt19937_jump.py.
# Discarding runs at 0.6 G draws/s; a jump takes 2 ms, and 2 ms more if its distance is a new one.
_JUMP_BEYOND_NUM_DRAWS = 1_500_000

# Places of a stream that are remembered: the same few are sought again and again.
_NUM_SOUGHT = 16


class Stream:
    """The words a CPU generator draws after ``state``.

    Args:
        state: What ``torch.Generator.get_state()`` returns; copied.

    Attributes:
        origin: That state.
    """

    def __init__(self, state: Tensor) -> None:
        self.origin = state.clone()
        left = int(state[_LEFT].view(torch.int32))
        self._num_left_in_block = left - 1
        self._base: tuple[int, Tensor] | None = None
        self._latest: tuple[int, Tensor] = (0, self.origin)
        self._sought: dict[int, Tensor] = {}

    def state(self, num_draws: int) -> Tensor:
        """Return, byte for byte, the state of a generator that drew ``num_draws`` draws.

        It has no spare normal.
        """
        if num_draws <= self._num_left_in_block:
            return _without_spare(_discard(self.origin, num_draws))
        start, source = self._nearest(num_draws)
        state = _move(source, num_draws - start)
        self._latest = (num_draws, state)
        self._sought[num_draws] = state
        if len(self._sought) > _NUM_SOUGHT:
            del self._sought[next(iter(self._sought))]
        return state

    def arrived(self, num_draws: int, state: Tensor) -> None:
        """Remember that a generator at ``num_draws`` is in ``state``; later reads start there."""
        if num_draws > self._num_left_in_block:
            self._latest = (num_draws, _without_spare(state))

    def digest(self) -> str:
        """Return what streams of the same words share."""
        return hashlib.sha256(bytes(_without_spare(self.origin).tolist())).hexdigest()

    def _nearest(self, num_draws: int) -> tuple[int, Tensor]:
        """Return the last known place before ``num_draws``, and the state there."""
        known = [self._latest, *self._sought.items()]
        first = self._base_draws()
        before = [place for place in known if first <= place[0] <= num_draws]
        return max(before, key=lambda place: place[0]) if before else self._start()

    def _base_draws(self) -> int:
        return self._num_left_in_block + 1

    def _start(self) -> tuple[int, Tensor]:
        """Return the first draw of the first block whose words all follow the recurrence."""
        if self._base is None:
            state = _discard(self.origin, self._base_draws())
            self._base = (self._base_draws(), _without_spare(state))
        return self._base


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A place in a stream, and the spare normal a generator has there.

    Attributes:
        stream: The words.
        num_draws: How many words have been drawn.
        spare: The place where the pair of serial normals was drawn whose second value is still
            to be handed out; or that value as a generator state holds it; or None.
    """

    stream: Stream
    num_draws: int = 0
    spare: Point | Tensor | None = None

    @classmethod
    def of(cls, state: Tensor) -> Point:
        """Return the place where a generator in ``state`` is."""
        spare = state[_SPARE].clone() if _has_spare(state) else None
        return cls(Stream(state), 0, spare)

    def after(self, num_draws: int) -> Point:
        """Return the place ``num_draws`` words further, with the same spare."""
        return replace(self, num_draws=self.num_draws + num_draws)

    def state(self) -> Tensor:
        """Return, byte for byte, the state of a generator that came here by drawing."""
        state = self.stream.state(self.num_draws)
        if self.spare is None:
            return state
        state = state.clone()
        spare = self.spare
        state[_SPARE] = spare.spare_after_pair() if isinstance(spare, Point) else spare
        return state

    def may_be_of(self, state: Tensor) -> bool:
        """Whether a generator in ``state`` may be here, as far as can be told for nothing.

        Its place within a block of 624 words is, and so is whether there is a spare.
        """
        here = _place(self.stream.origin) + self.num_draws
        return not (here - _place(state)) % NUM_WORDS and _has_spare(state) == (
            self.spare is not None
        )

    def spare_after_pair(self) -> Tensor:
        """Return the spare that drawing a pair of normals here leaves."""
        generator = torch.Generator()
        generator.set_state(self.stream.state(self.num_draws))
        torch.empty(1, dtype=torch.float64).normal_(generator=generator)
        return generator.get_state()[_SPARE]


def draws_between(before: Tensor, after: Tensor) -> int:
    """Return how many words lie between two states, both of one block or of neighbours."""
    moved = _place(after) - _place(before)
    same_block = torch.equal(before[_WORDS], after[_WORDS])
    return moved if same_block else moved + NUM_WORDS


def words_between(before: Tensor, after: Tensor, most: int) -> int | None:
    """Return how many words a generator drew from one state to another, by drawing them again.

    None if they are more than ``most``.
    """
    generator, num_words = torch.Generator(), 0
    generator.set_state(before)
    moved = _place(after) - _place(before)
    while num_words <= most:
        if torch.equal(words_of(generator.get_state()), words_of(after)):
            return num_words + moved
        discard(generator, NUM_WORDS)
        num_words += NUM_WORDS
    return None


def _place(state: Tensor) -> int:
    """Return how many words of its block of 624 a generator has drawn."""
    return NUM_WORDS - int(state[_LEFT].view(torch.int32)) + 1


def _has_spare(state: Tensor) -> bool:
    return bool(state[_SPARE_IS_VALID].view(torch.int32))


def _without_spare(state: Tensor) -> Tensor:
    state = state.clone()
    state[_SPARE] = 0
    return state


def _move(state: Tensor, distance: int) -> Tensor:
    if distance <= _JUMP_BEYOND_NUM_DRAWS:
        return _discard(state, distance)
    # Whole blocks, so that the words stay cut into blocks as drawing would have cut them.
    rest = distance % NUM_WORDS
    return _discard(_jump(state, distance - rest), rest)


def _discard(state: Tensor, num_draws: int) -> Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    discard(generator, num_draws)
    return generator.get_state()


def _jump(state: Tensor, distance: int) -> Tensor:
    """Return the state after ``distance`` draws, the words moved as one frame."""
    generator = torch.Generator()
    generator.set_state(_at_end_of_block(state))
    blocks = [words_of(state).to(torch.int32)]
    for _ in range(SEQUENCE_NUMEL // NUM_WORDS - 1):
        discard(generator, NUM_WORDS)
        blocks.append(words_of(generator.get_state()).to(torch.int32))
    words = advance(torch.cat(blocks), distance)
    state = state.clone()
    words_of(state).copy_(words.to(torch.int64) & 0xFFFFFFFF)
    return state


def words_of(state: Tensor) -> Tensor:
    """Return a view of the 624 words in a state, as int64."""
    return state[_WORDS].view(torch.int64)


def state_after_words(words: Tensor, state: Tensor) -> Tensor:
    """Return a state that draws what follows 624 words, with the seed of ``state``."""
    state = _at_end_of_block(_without_spare(state))
    words_of(state).copy_(words)
    return state


def state_before(words: Sequence[int]) -> Tensor:
    """Return a state that draws ``words`` next, 623 at most, and then nonsense."""
    state = _without_spare(torch.Generator().get_state())
    state[_LEFT].view(torch.int32).fill_(NUM_WORDS)
    state[_NEXT].view(torch.int64).fill_(1)
    words_of(state)[1 : 1 + len(words)] = torch.tensor([untempered(word) for word in words])
    return state


def _at_end_of_block(state: Tensor) -> Tensor:
    state = state.clone()
    state[_LEFT].view(torch.int32).fill_(1)
    state[_NEXT].view(torch.int64).fill_(NUM_WORDS)
    return state


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor looks like the state of a CPU generator."""
    return (
        tensor.dtype is torch.uint8
        and tensor.shape == torch.default_generator.get_state().shape
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
    )

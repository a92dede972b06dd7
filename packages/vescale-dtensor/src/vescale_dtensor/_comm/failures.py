"""When a rank fails, the ranks that wait for it say who it was.

A rank that raises writes its name and error to the rendezvous store. A collective that
breaks (a timeout, a closed connection) looks there before it raises.

[Note: failures that are over] A program may catch an error and go on. So failures are numbered.
A rank names the newest one that it has not named before; and a rank that has completed a
collective since it failed takes that back, for it evidently works with the others again.

[Note: where user code raises]
What a program's own lines raise (a loss, a hook, a backward function) passes through no code of
this package. If nobody catches it, the program ends: ``sys.excepthook`` announces it, which runs
before the connections close that tell the other ranks. A rank that catches such an error and
lives, but comes to no collective again, keeps the others waiting for their groups' timeout. A
wait cannot be given up earlier: the error may be over (see above), and a collective that was
begun and left would pair with a later one of the other ranks.

A rank that ends without an error, for its loop had fewer steps, says so as well: whoever still
waits for it names it.

[Note: where ranks wait]
When a collective breaks a rank writes where it waited to the store, and one whose time ran out,
or whose connection was closed, first reads there, for some seconds, what the others of the
collective say. A rank that says nothing waits in no collective: it computes, waits for something
else, or is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from vescale_dtensor._caches import forget_with_world, own_list, own_variable
from vescale_dtensor._torch_private import default_store

from .emulation import is_emulated
from .flight_recorder import dump_flight_recorder
from .positions import Collective, position, ranks_of, waited_for

_COUNT = "vescale/failures"
_NUM_LOOKED_AT = 1024  # entries; ranks that raise alike write one each
_PATIENCE = datetime.timedelta(seconds=5)  # with a store whose host may be gone
_HEARING_SECONDS = 3.0  # for ranks whose wait ends at about the same time

# What backends say of a connection whose other end is gone.
_CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")

# And of a time that ran out, in small letters.
_TIMED_OUT = ("timed out", "timeout")

_MARK = "_announced_as"  # on an exception

# What this rank wrote to the store and did not take back: the world it belongs to, key.
_standing: list[tuple[object, str]] = []
# The newest failure that this rank has named: the world, number, text.
_named: tuple[object, int, str] = (None, 0, "")


def _forget() -> None:
    global _named
    world = dist.group.WORLD
    _standing[:] = [each for each in _standing if each[0] is world]
    if _named[0] is not world:
        _named = (None, 0, "")


forget_with_world(_forget)
own_list(_standing)
own_variable(__name__, "_named")


class PeerError(RuntimeError):
    """Another rank failed, so a collective could not finish."""


@contextlib.contextmanager
def announced_failures() -> Iterator[None]:
    """Tell the other ranks about an exception that leaves this block.

    And from now on about any that ends the program; see [Note: where user code raises].
    """
    _watch_the_end()
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        announce(error)
        raise


_APART = (
    "Ranks came to different places: every rank has to call the model, backward and the optimizer "
    "as often as the others and in the same order, also for a loss that one rank alone reports"
)


def announce(error: BaseException, waited: str = "") -> None:
    """Write this rank's failure where waiting ranks look, and what it waited for, if it did."""
    if not dist.is_initialized() or is_emulated() or dist.get_world_size() == 1:
        return
    if _is_announced(error):
        return  # on its way out it leaves several blocks
    text = f"rank {dist.get_rank()} raised {type(error).__name__}: {str(error)[:2000]}"
    text = "; ".join([text, *(note[:2000] for note in getattr(error, "__notes__", ()))])
    where = f"waiting{waited}" if waited else position(error)
    text += f"; it was {where}" if where else ""
    # The store may be gone when the whole job is going down; the error itself still rises.
    with _patient_store() as store:
        number = store.add(_COUNT, 1)
        store.set(_key(number), text)
        vars(error)[_MARK] = _key(number)
        _standing.append((dist.group.WORLD, _key(number)))
        if not waited:
            happened = f"raised {type(error).__name__}" + (f", {where}" if where else "")
            _write_where(store, number, happened)


def _is_announced(error: BaseException) -> bool:
    return (dist.group.WORLD, vars(error).get(_MARK)) in _standing


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_hook_before: _Hook | None = None
_has_told = False  # what ended the program


def _watch_the_end() -> None:
    """Have what ends the program announced. Other hooks, torch's among them, still run."""
    global _hook_before
    if _hook_before is None:
        _hook_before, sys.excepthook = sys.excepthook, _announce_uncaught
        # Runs before what was registered earlier: the process group is still there.
        atexit.register(_announce_end)


def _announce_end() -> None:
    """Tell the others that this rank's program is over, unless it told them why already."""
    if not dist.is_initialized() or is_emulated() or dist.get_world_size() == 1 or _has_told:
        return
    with contextlib.suppress(Exception), _patient_store() as store:
        number = store.add(_COUNT, 1)
        store.set(
            _key(number),
            f"rank {dist.get_rank()} ended its program: did it have fewer batches, or stop early? "
            "Every rank has to take as many steps",
        )


def _announce_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    global _has_told
    assert _hook_before is not None
    _has_told = True
    # Whatever goes wrong here must not keep the error itself from being shown.
    with contextlib.suppress(Exception):
        _explain_or_announce(error)
    _hook_before(kind, error, trace)


def _explain_or_announce(error: BaseException) -> None:
    causes = list(_causes(error))
    if any(isinstance(each, PeerError) or _is_announced(each) for each in causes):
        return  # it is known already, by the text it began with
    if not dist.is_initialized() or is_emulated():
        return
    # The program's own collective broke, which does not ask for the rank that failed.
    if any(isinstance(each, RuntimeError) for each in causes) and (text := _announced()):
        error.add_note(f"{text}; this rank ({dist.get_rank()}) may have waited for it")
    announce(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def announce_alone(error: BaseException) -> None:
    """Announce what an operator raised, which may depend on the values that this rank has.

    An index may be out of range on one rank only. The others are done with the operator, and
    wait for this rank in the next collective. What no rank can do is raised on all of them.
    """
    if (
        not isinstance(error, PeerError | NotImplementedError)
        and not torch.compiler.is_compiling()
    ):
        announce(error)


@contextlib.contextmanager
def named_failures(*, completes: bool = True, of: Collective | None = None) -> Iterator[None]:
    """Turn a broken collective into an error that names the rank that failed.

    Args:
        completes: Whether the block waits for the collective's end, and does not only start it;
            see [Note: failures that are over].
        of: The collective and its ranks, if one is known.
    """
    _watch_the_end()
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized():  # a group that outlived its job has nobody to ask
            raise
        known, waited, before = _named, waited_for(of), _write_waiting(of)
        here = f"this rank ({dist.get_rank()}) was waiting for it{waited}"
        is_closed = any(text in str(error) for text in _CLOSED)
        # Who closed the connection may live, and be about to say why.
        heard = {} if (text := _announced()) or not is_closed else _hear_from(_others(of), before)
        if text := text or _announced():
            apart = "; it was waiting" in text and not text.endswith(f"; it was waiting{waited}")
            raise PeerError(f"{text}; {here}" + (f". {_APART}" if apart else "")) from error
        if known[0] is dist.group.WORLD:
            error.add_note(f"no other rank has reported a failure since {known[2]}")
        if is_closed:
            raise _lost_connection(of, heard) from error
        announce(error, waited)
        _say_who_waits(error, of, before)
        raise
    if _standing and completes:
        _take_back()


def _lost_connection(of: Collective | None, heard: dict[int, str]) -> PeerError:
    """Return, and announce, the error of a connection that nobody says to have closed."""
    waited = waited_for(of)
    here = f"this rank ({dist.get_rank()}) was waiting for it{waited}"
    elsewhere = [f"rank {rank} {text}" for rank, text in heard.items() if text != f"waits{waited}"]
    # A rank that says nothing may have been killed, while others were a collective ahead.
    if elsewhere and len(heard) == len(_others(of)):
        lost = PeerError(f"{'; '.join(elsewhere)}; {here}. {_APART}")
    else:
        lost = PeerError(
            "a rank's process ended without a word, as one that is killed does (the kernel does "
            "it when memory runs out), or whose backend gave up as ranks came to different "
            f"collectives; {here}. The launcher's output says which one and by what signal"
        )
    announce(lost)
    return lost


def _others(of: Collective | None) -> list[int]:
    return [rank for rank in ranks_of(of) if rank != dist.get_rank()]


def _say_who_waits(error: RuntimeError, of: Collective | None, before: int) -> None:
    """Add to an error where this rank and the others of a collective wait, if time ran out."""
    if not any(text in str(error).lower() for text in _TIMED_OUT) or is_emulated():
        return
    error.add_note(f"this rank ({dist.get_rank()}) waited{waited_for(of)}")
    others = _others(of)
    heard = _hear_from(others, before)
    for rank in others:
        silence = (
            f"has said nothing for {_HEARING_SECONDS:.0f} s: it waits in no collective whose time "
            "ran out, but computes, waits for something else, or is gone"
        )
        error.add_note(f"rank {rank} {heard.get(rank, silence)}")
    if any(where != f"waits{waited_for(of)}" for where in heard.values() if "waits" in where):
        error.add_note(_APART)
    if path := dump_flight_recorder(None if of is None else of.peers.group):
        error.add_note(f"torch's flight recorder of this rank is in {path}")


def _write_waiting(of: Collective | None) -> int:
    """Write where this rank waits; return how many failures there were. See [Note: where ..]."""
    count = 0
    if not dist.is_initialized() or is_emulated():
        return count
    with _patient_store() as store:
        count = store.add(_COUNT, 0)
        _write_where(store, count, f"waits{waited_for(of)}")
    return count


def _write_where(store: Any, count: int, text: str) -> None:
    key = _where_key(dist.get_rank())
    store.set(key, f"{count} {text}")
    if (dist.group.WORLD, key) not in _standing:
        _standing.append((dist.group.WORLD, key))


def _hear_from(ranks: list[int], before: int) -> dict[int, str]:
    """Return where ranks say that they wait, as soon as all of them have, or time is up."""
    heard: dict[int, str] = {}
    end = time.monotonic() + _HEARING_SECONDS
    with _patient_store() as store:
        while True:
            for rank in set(ranks) - heard.keys():
                key = _where_key(rank)
                said = store.get(key).decode() if store.check([key]) else ""
                number, _, text = said.partition(" ")
                if said and int(number) >= before:  # else of a failure that is over
                    heard[rank] = text
            if len(heard) == len(ranks) or time.monotonic() > end:
                break
            time.sleep(0.05)
    return heard


def _take_back() -> None:
    """Declare what this rank announced, and where it waited, to be over."""
    mine = [key for world, key in _standing if world is dist.group.WORLD]
    _standing.clear()
    with _patient_store() as store:
        for key in mine:
            store.set(key, "")


def _announced() -> str:
    """Return the newest failure of another rank that was not named yet; empty if none is."""
    global _named
    world, own = dist.group.WORLD, f"rank {dist.get_rank()} "
    with _patient_store() as store:
        newest = store.add(_COUNT, 0)
        oldest = max(_named[1] if _named[0] is world else 0, newest - _NUM_LOOKED_AT)
        for number in range(newest, oldest, -1):
            # The number may be taken already and the text not be there yet.
            text = store.get(_key(number)).decode() if store.check([_key(number)]) else ""
            if text and not text.startswith(own):
                _named = world, number, text
                return text
    return ""


@contextlib.contextmanager
def _patient_store() -> Iterator[Any]:
    """Yield the store; end the block quietly if it cannot be reached."""
    with contextlib.suppress(RuntimeError):
        store: Any = default_store()
        before = store.timeout
        store.set_timeout(_PATIENCE)
        try:
            yield store
        finally:
            store.set_timeout(before)


def _where_key(rank: int) -> str:
    return f"vescale/where/{rank}"


def _key(number: int) -> str:
    return f"vescale/failure/{number}"

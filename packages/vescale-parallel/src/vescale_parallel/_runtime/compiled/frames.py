"""Functions that torch.compile compiles in the calls of one block, and those that it gives up.

[Note: limits of shared code] Where a graph breaks, torch compiles the function behind the break by
itself. It is the user's: one code object for all blocks of all models of a process, emulated ranks
among them. torch counts the programs of a code object, and behind
``torch._dynamo.config.recompile_limit`` of them it makes no further one of it, nor of what it
calls, for the rest of the process, as a line of a log says. So the tenth model was not compiled
since nine before it were. Here programs are counted for each block; of code that has too many, no
more is compiled in the calls of that block, and nothing is set on the code.

torch calls this for a function of which no program fits, and passes it by where one does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, cast

import torch

from vescale_parallel._torch_private import (
    compiler_in_force,
    is_frame_of_disabled,
    run_once_as_written,
    unlimited_programs,
)


class CompiledFrames:
    """What torch.compile does with the functions that one block calls.

    Attributes:
        given_up: Why functions run as they are written: ``"file:line: why"``.
    """

    def __init__(self, function: Callable[..., Any], num_modules: int) -> None:
        """Begin with none.

        Args:
            function: That is to be compiled. No other one has its code object.
            num_modules: Of the block. Each may call code that they share in as many forms as torch
                allows one code object.
        """
        self._function, self._num_modules = function, num_modules
        self._programs: dict[CodeType, list[weakref.ref[CodeType]]] = {}
        self.given_up: dict[str, None] = {}
        self._torchdynamo_orig_backend: Any = None  # torch looks there for whose programs fit

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, where torch.compile compiles what is called."""
        convert = compiler_in_force()
        if not callable(convert):  # the program has switched compilation off
            return self._function(*args, **kwargs)
        self._torchdynamo_orig_backend = convert
        compiler_in_force(self)
        try:
            return self._function(*args, **kwargs)
        finally:
            compiler_in_force(convert)

    def __call__(self, frame: Any, *state: Any) -> Any:
        """Compile a function that is called, or have it run as it is written."""
        code: CodeType = frame.f_code
        if is_frame_of_disabled(2):
            return run_once_as_written(what_it_calls=False)
        programs = self._programs.setdefault(code, [])
        # torch forgets programs: when it is reset, and when what they are about is no more.
        programs[:] = [program for program in programs if program() is not None]
        limit = cast("Any", torch._dynamo).config.recompile_limit
        is_own = code is self._function.__code__
        if len(programs) >= (limit if is_own else limit * self._num_modules):
            self._give_up(
                code,
                f"it was compiled {len(programs)} times for this block, for as many kinds of "
                f"arguments; torch._dynamo.config.recompile_limit is {limit}",
            )
            return run_once_as_written(what_it_calls=True)
        with unlimited_programs():
            done = self._torchdynamo_orig_backend(frame, *state)
        if done.guarded_code is not None:
            programs.append(weakref.ref(done.guarded_code.code))
        return done

    def _give_up(self, code: CodeType, why: str) -> None:
        self.given_up[f"{code.co_filename}:{code.co_firstlineno}: {why}"] = None

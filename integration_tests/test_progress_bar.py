"""The progress report in a terminal that rich draws in."""

from __future__ import annotations

import io

from vescale import Progress


class Terminal(io.StringIO):
    """Text that is shown to a person."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_newest_report() -> None:
    terminal, seconds = Terminal(), iter(range(100))
    with Progress(None, 4, every=2, file=terminal, clock=lambda: next(seconds)) as progress:
        for loss in (4.0, 3.0, 2.5, 1.25):
            progress.step(loss)
    shown = terminal.getvalue()
    assert "4/4" in shown
    assert "loss 1.25" in shown
    assert "0.5 s a step" in shown

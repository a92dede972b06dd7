"""Which rule says what an operator does to axes."""

from __future__ import annotations

from collections.abc import Callable

from .graph import Linearity, OpCall

Rule = Callable[[OpCall], None]


class Rules(dict[str, tuple[Rule, Linearity]]):
    """Rules of a family of operators, by name without overload and outer underscores."""

    def __call__(self, *names: str, linear: Linearity = "no") -> Callable[[Rule], Rule]:
        """Add the decorated function as the rule of operators."""

        def add(function: Rule) -> Rule:
            self.update(dict.fromkeys(names, (function, linear)))
            return function

        return add

"""Functions of torch that keep a scalar linear in what it is made of, by name."""

from __future__ import annotations

ADD = {"add", "add_", "sub", "sub_", "__add__", "__radd__", "__iadd__", "__sub__", "__isub__"}
PRODUCTS = {"mul", "mul_", "__mul__", "__rmul__", "__imul__"}
QUOTIENTS = {"div", "div_", "true_divide", "__truediv__", "__itruediv__"}
KEEP = {
    *("neg", "__neg__", "to", "type", "float", "double", "half", "bfloat16", "clone"),
    *("view", "reshape", "squeeze", "contiguous", "requires_grad_"),
}


def is_plain_number(value: object) -> bool:
    """Whether Python has it as a number, and not as a truth."""
    return isinstance(value, int | float) and not isinstance(value, bool)

"""Code of functions and classes: the names it refers to, what compilers take, what is mixed in."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from vescale_parallel._torch_private import compiled_as_one_graph


def writes_to_first(func: Callable[..., Any]) -> bool:
    """Whether a function of torch writes to its first argument."""
    name: str = getattr(func, "__name__", "")
    is_dunder = name.startswith("__")
    return name.startswith(("__i", "__setitem__")) if is_dunder else name.endswith("_")


def names_of_class(cls: type[nn.Module]) -> set[str]:
    """Return the names that a module's class has in its code, that of ``__init__`` left out."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    functions = (
        function
        for base in bases
        for name, function in vars(base).items()
        if isinstance(function, FunctionType) and name != "__init__"
    )
    return {name for function in functions for name in _names_of_function(function)}


def names_of_code(code: CodeType) -> Iterator[str]:
    """Yield the names of code, and of functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of_code(constant)


def _names_of_function(function: FunctionType) -> Iterator[str]:
    # Decorators keep what they wrap.
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, FunctionType):
        yield from _names_of_function(wrapped)
    yield from names_of_code(function.__code__)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same and shares its code object with no other one.

    torch.compile counts programs by code object. What wraps every module of a model has one, and
    after ``torch._dynamo.config.recompile_limit`` modules the others would not be compiled.
    """
    plain = cast("FunctionType", function)
    own = FunctionType(
        plain.__code__.replace(),
        plain.__globals__,
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    own.__kwdefaults__ = plain.__kwdefaults__
    return functools.update_wrapper(own, getattr(plain, "__wrapped__", plain))


def refuse_one_graph(model: nn.Module, fqns: Collection[str], why: str) -> None:
    """Refuse ``module.compile(fullgraph=True)`` of what has a module that is left out of graphs.

    Args:
        model: Whose modules may be compiled.
        fqns: Of those that are left out.
        why: They are.

    Raises:
        ValueError: With the names of both.
    """
    if "torch._dynamo" not in sys.modules:
        return
    for at, module in model.named_modules():
        if not at or not compiled_as_one_graph(module):
            continue
        within = next((fqn for fqn in sorted(fqns) if f"{fqn}.".startswith(f"{at}.")), None)
        if within is not None:
            breaks = "it has" if within == at else f"{within!r} within it has"
            raise ValueError(
                f"{at!r} was compiled with fullgraph=True, and {breaks} to be left out of graphs: "
                f"{why}; compile it without fullgraph"
            )


def mix_in(
    subject: nn.Module | Optimizer, mixin: type, namespace: Mapping[str, Any] | None = None
) -> None:
    """Put a class before a subject's own, in place; ``namespace`` is what the new class has."""
    cls: Any = type(subject)
    made = {"__module__": cls.__module__, **(namespace or {})}
    try:
        subject.__class__ = type(cls.__name__, (mixin, cls), made)
    except TypeError:
        subject.__class__ = _behind(cls, mixin)(cls.__name__, (cls, mixin), made)


def _behind(cls: type, mixin: type) -> Any:
    """Return the metaclass of classes that list a mixin last and look into it first.

    An object may become one of another class only if both are laid out alike, and Python compares
    their first bases. That of ``Net(ABC, nn.Module)`` or ``Base(Generic[T], Optimizer)`` has
    neither attributes nor weak references; a class whose first base has both is taken for another
    layout, and one whose first base is Net is not.
    """

    def mro(made: type) -> Any:
        if made.__bases__ != (cls, mixin):
            return type.mro(made)
        return [made, mixin, *cls.__mro__]

    return type("MixedIn", (type(cls),), {"mro": mro})

"""Settings that forward writes into configurations of modules, on every stage of a pipeline.

Models of transformers note in ``config.problem_type`` which loss their labels ask for, beside the
loss, which only the last stage comes to. Configurations are saved with a model and read by later
code on every rank, so what the last stage's forward writes into them is written on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

Setting = tuple[str, str]  # the module's name, and the attribute of its configuration
Settings = Mapping[Setting, Any]
_PLAIN = (bool, int, float, str, type(None))


def settings_of(model: nn.Module) -> dict[Setting, Any]:
    """Return the plain values in configurations of a model's modules."""
    return {
        (fqn, name): value
        for fqn, config in _configurations(model)
        for name, value in vars(config).items()
        if isinstance(value, _PLAIN)
    }


def changed_settings(before: Settings, now: Settings) -> dict[Setting, Any]:
    """Return those that are new, or another value than before."""
    return {at: value for at, value in now.items() if at not in before or before[at] != value}


def write_settings(model: nn.Module, settings: Settings) -> None:
    """Write settings into configurations, in place."""
    for (fqn, name), value in settings.items():
        setattr(model.get_submodule(fqn).config, name, value)


def _configurations(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the distinct objects that modules call their ``config``, by a module's name."""
    known = set[int]()
    for fqn, module in model.named_modules():
        config = vars(module).get("config")
        if hasattr(config, "__dict__") and id(config) not in known:
            known.add(id(config))
            yield fqn, config

"""Hooks of users under a pipeline: together, its ranks' hooks see what one device's do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import SGD

import vescale
from vescale_testing import World

from .crossing_models import make
from .plans import PARTS, PP, make_plan

# Sums by the module's name, in the order in which they were seen; of inputs, then of outputs.
Seen = dict[str, list[float]]


class Notes:
    """Notes the sums of tensors that hooks are given."""

    def __init__(self) -> None:
        self.seen: Seen = {}

    def note(self, name: str, given: Any) -> None:
        leaves = list(given.values()) if isinstance(given, dict) else [given]
        leaves = [x for leaf in leaves for x in (leaf if isinstance(leaf, tuple) else (leaf,))]
        sums = [float(x.detach().double().sum()) for x in leaves if isinstance(x, Tensor)]
        self.seen.setdefault(name, []).extend(sums)

    def hooked(self, model: nn.Module, names: list[str]) -> None:
        for fqn in names:
            module = model.get_submodule(fqn)

            def before(_: nn.Module, args: Any, kwargs: Any, fqn: str = fqn) -> None:
                self.note(f"{fqn} in", (*args, *kwargs.values()))

            def after(_: nn.Module, args: Any, output: Any, fqn: str = fqn) -> None:
                self.note(f"{fqn} out", output)

            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after, always_call=True)


NAMES = {
    # Containers of blocks, with what they return, and a module without parameters.
    "t5": ["encoder", "decoder", "encoder.dropout", "decoder.dropout"],
    "opt": ["model", "model.decoder", "model.decoder.layers.1"],
}
BATCH_ONLY = ("encoder in", "model in", "model.decoder in")


def seen_by(name: str, constraints: dict[str, Any] | None) -> Seen:
    """Take a step with hooks that are added behind ``parallelize``."""
    model, batch = make(name, 4, torch.float32)
    notes = Notes()
    if constraints is None:
        notes.hooked(model, NAMES[name])
        for tensors in zip(*(x.chunk(2) for x in batch.values()), strict=True):
            with torch.no_grad():
                model(**dict(zip(batch, tensors, strict=True)))
        return notes.seen
    model, _ = vescale.parallelize(
        make_plan(constraints), model, lambda m: SGD(m.parameters(), lr=0.1)
    )
    notes.hooked(model, NAMES[name])
    model(**batch).loss.backward()
    return notes.seen


def global_sums() -> tuple[float, int]:
    """Return the least absolute sum that a global hook sees of a block, and how many it sees."""
    model, batch = make("opt", 4, torch.float32)
    found: list[float] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if type(module).__name__ == "OPTDecoderLayer":
            found.append(abs(float(output.detach().sum())))

    model, _ = vescale.parallelize(
        make_plan({PP: 2, PARTS: 2}), model, lambda m: SGD(m.parameters(), lr=0.1)
    )
    model(**batch).loss.backward()  # also looks at the form of the call, with values of its own
    handle = register_module_forward_hook(note)
    try:
        model(**batch).loss.backward()
    finally:
        handle.remove()
    return min(found), len(found)


@pytest.mark.by_day("opt")
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_all_stages_see_what_those_of_one_device_see(world2: World, name: str) -> None:
    expected = seen_by(name, None)
    ranks = world2.run(seen_by, name, {PP: 2, PARTS: 2})
    assert expected.keys() == ranks[0].keys() | ranks[1].keys()
    for where, sums in expected.items():
        found = [rank[where] for rank in ranks if where in rank]
        assert sums
        if where in BATCH_ONLY:
            # Every stage has it, and the look that the last one takes at a form of call.
            assert all(each[-len(sums) :] == sums and {*each} == {*sums} for each in found), where
        else:
            assert sorted(itertools.chain(*found)) == sorted(sums), where


@pytest.mark.slow
def test_global_hooks_see_blocks_once_and_with_values(world2: World) -> None:
    for least, count in world2.run(global_sums):
        assert least > 0
        assert count == 4

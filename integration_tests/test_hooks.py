"""What hooks are given on ranks is what they are given on one device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree  # noqa: PLC2701 (its other name is documented)

import vescale
from vescale_testing import RankError, World

from .plans import CP, SEQUENCE, TP, Constraints
from .test_stays_pytorch import Run, loss_of, notes_of

Program = Callable[[Run], None]
IN_REGIONS = {
    "nanogpt": (
        "blocks.0", "blocks.1.mlp", "blocks.1.mlp.0", "blocks.1.mlp.1", "blocks.0.attention",
        "blocks.1.attention.qkv",
    ),
    "llama": (
        "model.layers.0", "model.layers.1.self_attn", "model.layers.1.self_attn.q_proj",
        "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.act_fn",
        "model.layers.1.post_attention_layernorm", "model.layers.0.mlp.down_proj",
    ),
}  # fmt: skip


# They read what enters a region, or do so themselves.
READ_BY_COLUMNS = ("mlp.0", "q_proj", "qkv", "attention")


def first_tensor(values: Any) -> Tensor:
    return next(x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))


def hooked_backward(run: Run, model: nn.Module) -> dict[str, nn.Module]:
    """Return those that are called without names: torch's hooks see gradients of these alone."""
    return {fqn: each for fqn, each in hooked(run, model).items() if fqn[-9:] != "self_attn"}


def hooked(run: Run, model: nn.Module) -> dict[str, nn.Module]:
    return {fqn: model.get_submodule(fqn) for fqn in IN_REGIONS[run.kind]}


def reading(run: Run) -> None:
    """Notes arguments and what is returned: hooks of before and after parallelize."""
    model, call = run.build()
    seen: list[Any] = []

    def note(*given: Any) -> None:
        seen.append([first_tensor(each) for each in given if each])

    def add() -> None:
        for module in hooked(run, model).values():
            module.register_forward_pre_hook(
                lambda _, args, kwargs: note((args, kwargs)), with_kwargs=True
            )
            module.register_forward_hook(
                lambda _, args, kwargs, out: note((args, kwargs), (out,)), with_kwargs=True
            )

    add()
    model = run.parallelize(model)
    add()
    loss_of(model, call).backward()
    with torch.no_grad():
        model(**call)
    run.note(seen)
    run.note_gradients(model)


def penalty(run: Run) -> None:
    """Adds means of squares of what modules return, and of what they are given, to the loss."""
    model, call = run.start()
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        kept.extend([first_tensor((args, kwargs)), first_tensor(output)])

    for module in hooked(run, model).values():
        module.register_forward_hook(keep, with_kwargs=True)
    loss = loss_of(model, call)
    loss = loss + sum((x.square().mean() for x in kept), start=torch.zeros(()))
    loss.backward()
    run.note(loss)
    run.note_gradients(model)


def replacing(run: Run) -> None:
    """Returns other activations than modules do, by position and feature."""
    model, call = run.start()

    def steer(_: nn.Module, args: Any, output: Any) -> Any:
        first = first_tensor(output)
        made = first.flip(1) + torch.linspace(0, 1, first.shape[-1], dtype=first.dtype)
        return made if isinstance(output, Tensor) else (made, *output[1:])

    for module in hooked(run, model).values():
        module.register_forward_hook(steer)
    loss = loss_of(model, call)
    loss.backward()
    run.note(loss)
    run.note_gradients(model)


def writing(run: Run) -> None:
    """Writes into what modules return, and into what they are given."""
    model, call = run.start()

    def behind(_: nn.Module, args: Any, output: Any) -> None:
        first_tensor(output)[:, -1, ::2] *= 2

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        first_tensor((args, kwargs))[:, 0] += 1

    handles: list[Any] = []
    for fqn, module in hooked(run, model).items():
        if fqn.endswith(READ_BY_COLUMNS):
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            handles.append(handle)
        elif fqn.endswith(("0", "act_fn", "down_proj")):
            module.register_forward_pre_hook(before, with_kwargs=True)
        else:
            module.register_forward_hook(behind)
    with torch.no_grad():
        run.note(loss_of(model, call))
    for handle in handles:  # where torch refuses writes of a program that is trained
        handle.remove()
    loss_of(model, call).backward()
    run.note_gradients(model)


def replacing_arguments(run: Run) -> None:
    model, call = run.start()

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (args[0].flip(1) * 1.5, *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: kwargs[name].flip(1) * 1.5}

    for module in hooked(run, model).values():
        module.register_forward_pre_hook(before, with_kwargs=True)
    loss = loss_of(model, call)
    loss.backward()
    run.note(loss)
    run.note_gradients(model)


def gradients(run: Run) -> None:
    """Hooks of backward, and hooks of tensors that hooks of modules put on."""
    model, call = run.start()
    seen: list[Any] = []
    for fqn, module in hooked_backward(run, model).items():
        module.register_full_backward_hook(
            lambda _, inputs, grads, fqn=fqn: seen.append((fqn, inputs, grads))
        )
        module.register_full_backward_pre_hook(lambda _, grads, fqn=fqn: seen.append((fqn, grads)))
        module.register_forward_hook(
            lambda _, args, out, fqn=fqn: (
                first_tensor(out).register_hook(lambda grad: seen.append((fqn, grad))) and None
            )
        )
    loss_of(model, call).backward()
    run.note(seen)
    run.note_gradients(model)


def other_gradients(run: Run) -> None:
    """Hooks of backward that return others."""
    model, call = run.start()

    def flipped(_: nn.Module, inputs: Any, grads: Any) -> Any:
        return tuple(None if x is None else x.flip(-1) for x in inputs)

    for module in hooked_backward(run, model).values():
        module.register_full_backward_hook(flipped)
        module.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2, *grads[1:]))
    loss_of(model, call).backward()
    run.note_gradients(model)


PLANS: dict[str, Constraints] = {
    "tp": {TP: 2},
    "sequence": {TP: 2, SEQUENCE: True},
    "cp": {CP: 2},
    "ring": {CP: 2, "context_parallel.method": "ring"},
}
PROGRAMS = [reading, penalty, replacing, writing, replacing_arguments, gradients, other_gradients]


@cache
def planned(kind: str, name: str) -> str:
    model, call = Run(kind=kind, plan=None).build()
    plan = vescale.generate_plan(model, PLANS[name], world_size=2, example_batch=call)
    return plan.to_json()


def check(world: World, program: Program, kind: str, plan: str) -> None:
    expected = notes_of(program, kind, None)
    assert any(isinstance(value, Tensor) for _, value in expected)
    for found in world.run(notes_of, program, kind, plan):
        assert [path for path, _ in found] == [path for path, _ in expected]
        for (path, one), (_, other) in zip(found, expected, strict=True):
            if not isinstance(other, Tensor):
                assert one == other
                continue
            # Float64, summed in another order: small elements are sums of large ones.
            close = 1e-12 * float(other.abs().max()) + 1e-15
            torch.testing.assert_close(one, other, rtol=1e-11, atol=close, msg=path)


@pytest.mark.by_day("*-nanogpt-tp", "*-llama-sequence", "*-llama-cp")
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", ["nanogpt", "llama"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_hooks_see_what_one_device_has(
    world2: World, program: Program, kind: str, name: str
) -> None:
    check(world2, program, kind, planned(kind, name))


def on_one_rank(plan: str, fqn: str) -> int:
    """Add a hook on the first rank alone; return how often it was called there."""
    model, call = Run(kind="nanogpt", plan=plan).start()
    num_calls: list[float] = []
    if dist.get_rank() == 0:
        model.get_submodule(fqn).register_forward_hook(
            lambda _, args, output: num_calls.append(float(first_tensor(output).detach().sum()))
        )
    loss_of(model, call).backward()
    return len(num_calls)


def test_a_hook_of_one_rank_may_look_at_what_is_whole(world2: World) -> None:
    assert world2.run(on_one_rank, planned("nanogpt", "tp"), "blocks.0") == [1, 0]


def seen_by_one_rank(plan: str) -> list[float]:
    """Add a hook that notes on the first rank, and one that does nothing on the others."""
    model, call = Run(kind="nanogpt", plan=plan).start()
    noted: list[float] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        noted.append(float(first_tensor(output).detach().abs().sum()))

    def nothing(_: nn.Module, args: Any, output: Any) -> None: ...

    hook = note if dist.get_rank() == 0 else nothing
    model.get_submodule("blocks.0.mlp.1").register_forward_hook(hook)
    loss_of(model, call)
    return noted


def test_ranks_may_have_functions_of_their_own(world2: World) -> None:
    found = world2.run(seen_by_one_rank, planned("nanogpt", "tp"))
    assert [len(noted) for noted in found] == [1, 0]


@pytest.mark.nightly  # half of a timeout of collectives
def test_a_hook_of_one_rank_that_needs_others_is_an_error_that_names_it(world2: World) -> None:
    error = r"rank 0 has a hook that rank 1 has not, of .blocks.0.mlp.1. in .*on_one_rank"
    with pytest.raises(RankError, match=error):
        world2.run(on_one_rank, planned("nanogpt", "tp"), "blocks.0.mlp.1")


def coming_and_going(run: Run) -> None:
    """Adds and removes hooks between calls, of other lengths: 7 and 5 positions."""
    model, call = run.start()
    seen: list[Any] = []
    for step in range(4):
        length = 7 if step % 2 else 5
        now = pytree.tree_map_only(Tensor, lambda x, n=length: x[:, :n], call)
        handles = [
            module.register_forward_hook(lambda _, args, out: seen.append(first_tensor(out)))
            for module in [*hooked(run, model).values()][step:]
        ]
        loss_of(model, now).backward()
        if step != 1:
            for handle in handles:
                handle.remove()
    run.note(seen)
    run.note_gradients(model)


class Object:
    """A hook that is an object, with what it is told in its attributes."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.seen.append(first_tensor(output))

    def method(self, scale: float, module: nn.Module, args: Any, output: Any) -> None:
        self.seen.append(scale * first_tensor(output))


def objects(run: Run) -> None:
    """Objects, methods, partial functions, and hooks that are always called or come first."""
    model, call = run.start()
    hook = Object()
    for module in hooked(run, model).values():
        module.register_forward_hook(hook, always_call=True)
        module.register_forward_hook(functools.partial(hook.method, 2.0), prepend=True)
    loss_of(model, call).backward()
    run.note(hook.seen)


def kept_gradients(run: Run) -> None:
    """Reads ``.grad`` of what modules return."""
    model, call = run.start()
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: Any, output: Any) -> None:
        kept.append(first_tensor(output))
        kept[-1].retain_grad()

    for module in hooked(run, model).values():
        module.register_forward_hook(keep)
    loss_of(model, call).backward()
    run.note([x.grad for x in kept])


@pytest.mark.by_day("*-nanogpt-sequence", "*-llama-cp")
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", ["nanogpt", "llama"])
@pytest.mark.parametrize("program", [coming_and_going, objects, kept_gradients])
def test_hooks_of_any_kind_see_what_one_device_has(
    world2: World, program: Program, kind: str, name: str
) -> None:
    check(world2, program, kind, planned(kind, name))


def with_a_global_hook(plan: str) -> list[str]:
    model, call = Run(kind="nanogpt", plan=plan).start()
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                loss_of(model, call)
    finally:
        handle.remove()
    return [str(each.message) for each in caught]


def test_a_hook_of_all_modules_is_said_to_see_parts(world2: World) -> None:
    for told in world2.run(with_a_global_hook, planned("nanogpt", "tp")):
        assert len(told) == 1
        assert "a hook of all modules, sees what this rank has" in told[0]

"""Observing with equal blocks repeated comes to what running every one of them does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_parallel import Observation
from vescale_parallel._model.blocks import pipeline_blocks
from vescale_parallel._trace import observe
from vescale_parallel._trace.repeated.description import described
from vescale_parallel._trace.repeated.record import repeat

_NUM_BLOCKS, _WIDTH = 8, 8


@pytest.fixture
def num_repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls of blocks have been repeated, in one place."""
    count = [0]

    def counting(*args: Any) -> Any:
        count[0] += 1
        return repeat(*args)

    monkeypatch.setattr("vescale_parallel._trace.repeated.blocks.repeat", counting)
    return count


def _observed(model: nn.Module, batch: Any, *, repeats: bool, calls: int = 1) -> Observation:
    blocks = pipeline_blocks(model) * calls
    return observe._observed(model, batch, blocks, True, repeats=repeats)


class _Block(nn.Module):
    """Norm, matrix products, a residual; keeps some of each for its backward."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(_WIDTH)
        self.inner = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.outer = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class _Stack(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module] = _Block) -> None:
        super().__init__()
        self.stem = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(make(index) for index in range(_NUM_BLOCKS))
        self.head = nn.Linear(_WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.stem(x))).sum()

    def between(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


_BATCH = torch.ones(3, 5, _WIDTH)


def test_of_equal_blocks_two_are_run(num_repeated: list[int]) -> None:
    assert _observed(_Stack(), _BATCH, repeats=True) == _observed(_Stack(), _BATCH, repeats=False)
    assert num_repeated == [_NUM_BLOCKS - 2]


def test_classes_and_forwards_are_what_they_were() -> None:
    model = _Stack()
    before = dict(vars(_Block)), [set(vars(each)) for each in model.modules()]
    _observed(model, _BATCH, repeats=True)
    assert before == (dict(vars(_Block)), [set(vars(each)) for each in model.modules()])


class _ByParity(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.index % 2 else x + self.outer(self.inner(x))


class _Kinds(_Block):
    """Two kinds that take turns, told apart by an attribute."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.kind = ("plain", "normed")[index % 2]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.kind == "plain" else self.norm(x))


class _Counts(_Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class _InPlace(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(super().forward(x).detach())


class _Adds(_Block):
    """Changes its argument, and returns another thing."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(super().forward(x))
        return x.mean()


class _Normalizes(_Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.batch_norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch_norm(super().forward(x))


class _DrawsInPython(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


class _Rectified(_Block):
    """Its last operator keeps what the block returns."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class _HalfOfMore(_Block):
    """Returns a part of what it has memory for, and that memory is kept."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)).chunk(2, dim=-1)[1]


class _Widening(_Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.inner = nn.Linear(_WIDTH, 2 * _WIDTH if index < 5 else 3 * _WIDTH)
        self.outer = nn.Linear(self.inner.out_features, _WIDTH)


class _FrozenInPart(_Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(index < 3)


class _Buffered(_Block):
    """Integers in a buffer decide what it does."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.length = nn.Buffer(torch.tensor([2 + index // 4]))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.pad(
            super().forward(x[:, : int(self.length)]), (0, 0, 0, 5 - int(self.length))
        )


@pytest.mark.parametrize(
    "block",
    [
        _ByParity, _Kinds, _Counts, _InPlace, _Normalizes, _DrawsInPython, _Rectified, _HalfOfMore,
        _Widening, _FrozenInPart, _Buffered,
    ],
)  # fmt: skip
def test_blocks_of_every_kind_are_observed_as_if_all_were_run(
    block: Callable[..., _Block],
) -> None:
    model = _Stack(block)
    assert _observed(model, _BATCH, repeats=True) == _observed(model, _BATCH, repeats=False)


@pytest.mark.parametrize(("block", "times"), [(_ByParity, 0), (_Kinds, 4), (_Counts, 0)])
def test_what_differs_between_blocks_counts_if_it_is_read(
    block: Callable[..., _Block], times: int, num_repeated: list[int]
) -> None:
    _observed(_Stack(block), _BATCH, repeats=True)
    assert num_repeated == [times]


def test_blocks_that_all_differ_are_not_compared_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[object] = []

    def counting(*given: Any) -> Any:
        compared.append(given)
        return described(*given)

    monkeypatch.setattr("vescale_parallel._trace.repeated.blocks.described", counting)
    model = _Stack(_ByParity)
    model.blocks.extend(_ByParity(index) for index in range(_NUM_BLOCKS, 40))
    found = _observed(model, _BATCH, repeats=True)
    assert len(compared) == 2 * 12  # before and after
    assert found == _observed(model, _BATCH, repeats=False)


class _Tells(_Block):
    """Leaves what it computes inside where others may find it."""

    def __init__(self, told: list[Tensor]) -> None:
        super().__init__()
        self.tell = told.append

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(self.norm(x))
        self.tell(scores)
        return x + self.outer(torch.tanh(scores))


class _SumsWhatIsTold(_Stack):
    """As a mixture of experts whose losses are collected in a list of the module."""

    def __init__(self) -> None:
        told: list[Tensor] = []
        super().__init__(lambda _: _Tells(told))
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        self.told.clear()
        return super().forward(x) + sum(each.square().mean() for each in self.told)


_TOLD: list[Tensor] = []


class _TellsAll(_Block):
    """Leaves what it computes in a global list."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(self.norm(x))
        _TOLD.append(scores)
        return x + self.outer(torch.tanh(scores))


class _ReadsGlobals(_Stack):
    def __init__(self) -> None:
        super().__init__(_TellsAll)

    def forward(self, x: Tensor) -> Tensor:
        _TOLD.clear()
        return super().forward(x) + sum(each.square().mean() for each in _TOLD)


class _ReturnsGlobals(_ReadsGlobals):
    def forward(self, x: Tensor) -> Any:
        _TOLD.clear()
        return _Stack.forward(self, x), list(_TOLD)


class _CountsGlobally(_Block):
    def forward(self, x: Tensor) -> Tensor:
        _TOLD.append(x)
        return super().forward(x) if len(_TOLD) % 2 else x + self.inner(x)[..., :_WIDTH]


class _GlobalParity(_ReadsGlobals):
    def __init__(self) -> None:
        _Stack.__init__(self, _CountsGlobally)

    def forward(self, x: Tensor) -> Tensor:
        _TOLD.clear()
        return _Stack.forward(self, x)


class _Skips(_Stack):
    """Blocks of the second half get what those of the first returned."""

    def between(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = [x := block(x) for block in self.blocks[:4]]
        for block in self.blocks[4:]:
            x = block(torch.tanh(x) * seen.pop())
        return x


class _RectifiesBetween(_Stack):
    """Up to some block, what blocks are given is kept by what made it."""

    def between(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(torch.relu(x) if index < 4 else x + 1)
        return x


class _AddsInPlace(_Stack):
    def __init__(self) -> None:
        super().__init__(_Adds)

    def between(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block(x)
        return x


class _TellsTwo(_Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), torch.tanh(self.inner(x))


class _DropsScores(_Stack):
    def __init__(self) -> None:
        super().__init__(_TellsTwo)

    def between(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


class _CountsByHook(_Stack):
    def forward(self, x: Tensor) -> Tensor:
        seen: list[int] = []
        handles = [
            block.get_submodule("inner").register_forward_hook(lambda *_: seen.append(1))
            for block in self.blocks
        ]
        found = super().forward(x)
        for handle in handles:
            handle.remove()
        return (found * torch.ones(len(seen))).exp().sum()


class _Detaches(_Stack):
    def between(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x.detach() if index == 6 else x)
        return x


class _DetachesWithTable(_Stack):
    """The first to keep what all blocks share teaches nobody."""

    def __init__(self) -> None:
        super().__init__(_TakesMore)
        self.table = nn.Linear(1, _WIDTH)

    def between(self, x: Tensor) -> Tensor:
        table = self.table(x[..., :1])
        for index, block in enumerate(self.blocks):
            x = block(x * 1.5, table, options={"squares": False})["x"]
            x = x.detach().requires_grad_() if index == 4 else x
        return x


class _DropsGraphs(_Stack):
    """The first blocks teach nobody."""

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks[:4]:
                x = block(x)
        for block in self.blocks[4:]:
            x = block(x)
        return x


class _DropsOne(_Stack):
    """What one block does is thrown away."""

    def between(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = (block(x), x)[index == 5]
        return x


class _Checkpoints(_Stack):
    def between(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)
        return x


class _Autocasts(_Stack):
    def between(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=index > 4):
                x = block(x)
        return x


class _TakesMore(nn.Module):
    """Takes a table that the first block is the first to keep, and options."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.block = _Block(index)

    def forward(self, x: Tensor, table: Tensor, *, options: dict[str, Any]) -> dict[str, Tensor]:
        x = self.block(x) * table
        return {"x": x * x if options["squares"] else x, "table": table}


class _Options(_Stack):
    def __init__(self) -> None:
        super().__init__(_TakesMore)
        self.table = nn.Linear(1, _WIDTH)

    def between(self, x: Tensor) -> Tensor:
        table = self.table(x[..., :1])
        for index, block in enumerate(self.blocks):
            found: Any = block(x, table, options={"squares": index > 3})
            x, table = found["x"], found["table"]
        return x


class _LooksInside(_Stack):
    """Has a hook on a module in each block, as libraries that collect attention's scores do."""

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handles = [
            block.get_submodule("inner").register_forward_hook(
                lambda *given: seen.append(given[-1])
            )
            for block in self.blocks
        ]
        found = super().forward(x)
        for handle in handles:
            handle.remove()
        return found + sum(each.mean() for each in seen)


class _SharesNorm(_Stack):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(_WIDTH)
        for block in self.blocks:
            block.norm = norm


class _SharesWeights(_Stack):
    """The head's weights are those of a block; others are tied among blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_WIDTH, 2 * _WIDTH)
        for one, other in ((self.head, 5), (self.blocks[6].get_submodule("inner"), 4)):
            one.weight = self.blocks[other].get_parameter("inner.weight")


@pytest.mark.parametrize(
    "make",
    [
        _SumsWhatIsTold, _ReadsGlobals, _ReturnsGlobals, _GlobalParity, _Skips, _Detaches,
        _DetachesWithTable, _DropsGraphs, _DropsOne, _DropsScores, _Checkpoints, _Autocasts,
        _Options, _LooksInside, _CountsByHook, _SharesNorm, _SharesWeights, _RectifiesBetween,
        _AddsInPlace,
    ],
)  # fmt: skip
def test_models_that_hold_their_blocks_in_odd_ways_are_observed_as_if_all_were_run(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    assert _observed(model, _BATCH, repeats=True) == _observed(model, _BATCH, repeats=False)


class _OverAndOver(_Stack):
    def between(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = super().between(x)
        return x


def test_blocks_that_are_called_again_are_repeated(num_repeated: list[int]) -> None:
    model = _OverAndOver()
    found = _observed(model, _BATCH, repeats=True, calls=3)
    assert num_repeated[0] > _NUM_BLOCKS
    assert found == _observed(model, _BATCH, repeats=False, calls=3)


_FAMILIES: dict[str, dict[str, Any]] = {
    "bart": {"encoder_layers": 6, "decoder_layers": 6, "d_model": 32, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4},
    "bert": {"num_hidden_layers": 8},
    "deepseek_v3": {"num_hidden_layers": 8, "first_k_dense_replace": 3, "n_routed_experts": 8,
                    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 16,
                    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 8, "moe_intermediate_size": 16, "num_key_value_heads": 4},
    "gemma2": {"num_hidden_layers": 8, "head_dim": 8},
    "gemma3_text": {"num_hidden_layers": 18, "head_dim": 8},
    "gpt2": {"n_layer": 8, "n_embd": 32, "n_head": 4},
    "llama": {"num_hidden_layers": 8},
    "mixtral": {"num_hidden_layers": 8, "num_local_experts": 4, "output_router_logits": True},
    "qwen2_moe": {"num_hidden_layers": 8, "decoder_sparse_step": 2, "num_experts": 4,
                  "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "t5": {"num_layers": 6, "d_model": 32, "num_heads": 4, "d_ff": 48, "d_kv": 8,
           "decoder_start_token_id": 0},
}  # fmt: skip
_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


@pytest.mark.by_day(
    "plain-bert", "plain-gemma2", "plain-gpt2", "plain-llama", "hidden states-gpt2"
)
@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("tells_all", [False, True], ids=["plain", "hidden states"])
def test_families_are_observed_as_if_all_blocks_were_run(
    family: str, tells_all: bool, num_repeated: list[int]
) -> None:
    own = _FAMILIES[family]
    given = {**(own if "d_model" in own or "n_embd" in own else {**_SMALL, **own})}
    given |= {"vocab_size": 64, "use_cache": False, "output_hidden_states": tells_all}
    config = transformers.AutoConfig.for_model(family, **given)
    of_two = getattr(config, "is_encoder_decoder", False)
    auto = transformers.AutoModelForSeq2SeqLM if of_two else transformers.AutoModelForCausalLM
    if family == "bert":
        auto = transformers.AutoModelForMaskedLM
    model = auto.from_config(config).train()
    ids = torch.arange(20).reshape(2, 10) % 50 + 1
    batch = {"input_ids": ids, "labels": ids}
    found = _observed(model, batch, repeats=True)
    # Those that tell more collect it by hooks on modules inside of blocks.
    assert (num_repeated[0] > 0) is (not tells_all and family != "mixtral")
    assert found == _observed(model, batch, repeats=False)

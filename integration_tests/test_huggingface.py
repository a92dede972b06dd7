"""Models to HuggingFace's directories and back under every plan, as transformers does it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vescale
import vescale_ckpt
from vescale_testing import World

from .families import make
from .models import HandWritten
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints, make_plan
from .test_bad_input import attempt, check

PLANS: dict[str, Constraints] = {
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
}
FOUR: dict[str, Constraints] = {
    "pp-tp": {PP: 2, PARTS: 2, TP: 2},
    "tp-sequence-zero3": {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3},
}
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 64,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "hand_written":
        return HandWritten()
    if kind == "wide":  # parts are far larger than the megabyte that is read at once
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(2)))
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    name = kind.split()[0]
    sizes = {**SMALL, "tie_word_embeddings": "tied" in kind, **(MOE if name == "mixtral" else {})}
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 61, "n_positions": 64}
    factory = AutoModel if "base" in kind else AutoModelForCausalLM
    model = factory.from_config(AutoConfig.for_model(name, **sizes))
    return model.to(torch.bfloat16) if "bfloat16" in kind else model


class Tokenizer:
    def save_pretrained(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")


def save(path: str, kind: str, constraints: Constraints, size: str | None, how: str) -> None:
    model: Any = vescale.parallelize(make_plan(constraints), build(kind))
    if how == "export":
        tokenizer = Tokenizer()
        vescale.export(model, path, tokenizer=tokenizer, max_shard_size=size or "5GB")
    elif size is None:
        model.save_pretrained(path)
    else:
        model.save_pretrained(path, max_shard_size=size)


def read(directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    texts = {path.name: json.loads(path.read_text()) for path in directory.glob("*.json")}
    for text in texts.values():
        if "target_modules" in text:  # PEFT writes a set as it comes
            text["target_modules"] = sorted(text["target_modules"])
    return texts, {path.name: load_file(path) for path in directory.glob("*.safetensors")}


def same_directories(found: Path, expected: Path) -> None:
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    (texts, files), (other_texts, other_files) = read(found), read(expected)
    assert texts == other_texts
    for name, tensors in other_files.items():
        assert files[name].keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert files[name][key].dtype == tensor.dtype
            assert torch.equal(files[name][key], tensor), key


CASES = [
    *(("llama tied", plan, "20KB") for plan in PLANS), ("llama bfloat16", "tp", None),
    ("gpt2", "pp", "30KB"), ("mixtral", "zero3", None),
]  # fmt: skip


@pytest.mark.by_day("llama tied-pp-20KB", "gpt2-pp-30KB", "mixtral-zero3-None")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "plan", "size"), CASES)
def test_save_pretrained_writes_what_one_device_writes(
    world2: World, tmp_path: Path, kind: str, plan: str, size: str | None
) -> None:
    options: dict[str, Any] = {} if size is None else {"max_shard_size": size}
    build(kind).save_pretrained(tmp_path / "one", **options)  # pyright: ignore[reportCallIssue]: transformers'
    world2.run(save, str(tmp_path / "ranks"), kind, PLANS[plan], size, "save_pretrained")
    same_directories(tmp_path / "ranks", tmp_path / "one")


def save_around(path: str) -> None:
    """Save a model whose class has a ``save_pretrained`` around that of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Around(LlamaForCausalLM):
        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            super().save_pretrained(save_directory, *args, **kwargs)

    torch.manual_seed(0)
    model: Any = Around(LlamaConfig(**SMALL))
    vescale.parallelize(make_plan({}), model).save_pretrained(path)


def test_a_model_that_wraps_save_pretrained_is_saved(world1: World, tmp_path: Path) -> None:
    world1.run(save_around, str(tmp_path))
    assert (tmp_path / "config.json").exists()
    found = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" in found


def classified(path: str, constraints: Constraints | None) -> str | None:
    """Return what a classifier takes its problem for after a step, on this rank."""
    model: Any
    model, batch = make("vit")
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
    model(**batch).loss.backward()
    model.save_pretrained(path)
    return model.config.problem_type


@pytest.mark.slow
def test_what_forward_notes_in_a_configuration_is_saved_under_a_pipeline(
    world2: World, tmp_path: Path
) -> None:
    expected = classified(str(tmp_path / "one"), None)
    assert world2.run(classified, str(tmp_path / "ranks"), PLANS["pp"]) == [expected] * 2
    (found, _), (texts, _) = read(tmp_path / "ranks"), read(tmp_path / "one")
    assert found == texts
    assert texts["config.json"]["problem_type"] == expected


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("plan", FOUR)
def test_transformers_loads_what_several_axes_exported(
    world4: World, tmp_path: Path, plan: str
) -> None:
    from transformers import AutoModelForCausalLM

    world4.run(save, str(tmp_path), "llama tied", FOUR[plan], None, "export")
    assert (tmp_path / "tokenizer.json").exists()
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in build("llama tied").state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_any_module_is_exported(world2: World, tmp_path: Path, plan: str) -> None:
    world2.run(save, str(tmp_path), "hand_written", PLANS[plan], None, "export")
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "tokenizer.json"}
    found, expected = load_file(tmp_path / "model.safetensors"), build("hand_written").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# And back


def loaded(path: str, kind: str, constraints: Constraints, deferred: bool) -> dict[str, Tensor]:
    model: Any = vescale.deferred_init(build, kind) if deferred else build(kind)
    model: Any = vescale.parallelize(make_plan(constraints), model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    vescale.load_pretrained(model, path)
    return {name: x.full_tensor() for name, x in model.named_parameters(remove_duplicate=False)}


def moved(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    return model


@pytest.mark.by_day("zero3-False", "zero3-True", "tp-True", "pp-False")
@pytest.mark.slow
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_loads_what_transformers_saved(
    world2: World, tmp_path: Path, plan: str, *, deferred: bool
) -> None:
    expected = moved(build("llama tied"))
    expected.save_pretrained(tmp_path, max_shard_size="20KB")  # pyright: ignore[reportCallIssue]: transformers'
    of_ranks = world2.run(loaded, str(tmp_path), "llama tied", PLANS[plan], deferred)
    for found in of_ranks:
        for name, parameter in expected.named_parameters(remove_duplicate=False):
            assert torch.equal(found[name], parameter), name


@pytest.mark.by_day("llama-llama base")
@pytest.mark.slow
@pytest.mark.parametrize(("saved", "kind"), [("gpt2 base", "gpt2"), ("llama", "llama base")])
def test_the_prefix_of_the_base_model_is_put_on_and_taken_off(
    world2: World, tmp_path: Path, saved: str, kind: str
) -> None:
    expected = moved(build(saved))
    expected.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]: transformers'
    message = "lm_head.weight"
    if kind == "gpt2":  # its head is tied, so nothing is missing
        found = world2.run(loaded, str(tmp_path), kind, PLANS["tp"], False)[0]
        for name, parameter in expected.named_parameters():
            assert torch.equal(found[f"transformer.{name}"], parameter), name
    else:
        check(
            world2, vescale.CheckpointError, message, loaded, str(tmp_path), kind, PLANS["tp"],
            False,
        )  # fmt: skip


def test_what_transformers_never_saves_keeps_its_values(tmp_path: Path) -> None:
    from transformers import MarianConfig, MarianMTModel

    sizes: dict[str, Any] = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        "vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 0,
        "max_position_embeddings": 16,
    }  # fmt: skip
    expected, found = (MarianMTModel(MarianConfig(**sizes)) for _ in range(2))
    expected.save_pretrained(tmp_path)
    assert not any("embed_positions" in name for name in load_file(tmp_path / "model.safetensors"))
    vescale.load_pretrained(found, tmp_path)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("bert", "bert.embeddings.position_ids"),
    ],
)
def test_buffers_that_earlier_versions_of_transformers_saved_are_left_out(
    tmp_path: Path, kind: str, name: str
) -> None:
    expected, found = moved(build(kind)), build(kind)
    expected.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]: transformers'
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.arange(4)}, file)
    vescale.load_pretrained(found, tmp_path)
    for key, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key


def read_bytes(path: str, constraints: Constraints) -> int:
    model: Any = vescale.parallelize(make_plan(constraints), build("wide"))
    before = _num_read()
    vescale.load_pretrained(model, path)
    return _num_read() - before


def _num_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", "pp"])
def test_ranks_together_read_a_model_once(world2: World, tmp_path: Path, plan: str) -> None:
    vescale.export(build("wide"), tmp_path)
    nbytes = (tmp_path / "model.safetensors").stat().st_size
    of_ranks = world2.run(read_bytes, str(tmp_path), PLANS[plan])
    # Headers, and blocks that several ranks need a part of, come on top.
    assert sum(of_ranks) < 1.2 * nbytes, (of_ranks, nbytes)


def save_alone(path: str) -> str:
    model: Any = vescale.parallelize(make_plan({DP: 2}), build("llama"))
    short = datetime.timedelta(seconds=2)
    vescale_ckpt.save_safetensors = functools.partial(vescale_ckpt.save_safetensors, timeout=short)
    if dist.get_rank() == 0:
        answer = attempt(model.save_pretrained, path)
        assert answer is not None
        assert answer[0] is vescale.CheckpointError
        return answer[1]
    return ""


@pytest.mark.slow
def test_rank_0_alone_is_told_who_is_missing(world2: World, tmp_path: Path) -> None:
    message, _ = world2.run(save_alone, str(tmp_path))
    assert "rank 1 has died or hangs" in message
    world2.close()


def with_other_options(path: str) -> None:
    model: Any = vescale.parallelize(make_plan({TP: 2}), build("llama"))
    model.save_pretrained(path, push_to_hub=True)


@pytest.mark.slow
def test_an_option_that_would_be_ignored_is_refused(world2: World, tmp_path: Path) -> None:
    message = "does not take push_to_hub=True.*rank 0 writes"
    check(world2, ValueError, message, with_other_options, str(tmp_path))


def test_shards_are_divided_as_the_hub_does(tmp_path: Path) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    for sizes in ([6, 6, 2, 6, 2, 2], [1, 20, 1], [20], [10, 10]):
        tensors = {
            f"t{i}": torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(sizes)
        }
        split = split_torch_state_dict_into_shards(tensors, max_shard_size=10)
        path = tmp_path / str(sizes)
        vescale_ckpt.save_safetensors(path, tensors, max_file_nbytes=10)
        found = {p.name: sorted(load_file(p)) for p in path.glob("*.safetensors")}
        assert found == {name: sorted(keys) for name, keys in split.filename_to_tensors.items()}


@pytest.mark.slow
def test_files_that_transformers_converts_are_refused(world2: World, tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]: transformers'
    message = "is converted when transformers loads it.*save_original_format=False"
    arguments = (str(tmp_path), "mixtral", PLANS["zero3"], False)
    check(world2, vescale.CheckpointError, message, loaded, *arguments)


# Loops of others


def by_trainer(path: str) -> None:
    from transformers import Trainer, TrainingArguments

    model: Any = vescale.parallelize(make_plan({TP: 2}), build("llama"))
    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
    arguments = TrainingArguments(
        output_dir=path, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    data: Any = rows
    Trainer(model=model, args=arguments, train_dataset=data).train()


def adapted(path: str, constraints: Constraints | None) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    options: Any = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    base: Any = build("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft, about transformers 6
        model: Any = get_peft_model(base, LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    if constraints is not None:
        model: Any = vescale.parallelize(make_plan(constraints), model)
    model.save_pretrained(path)


@pytest.mark.slow
def test_transformers_trainer_is_refused_with_what_to_do(world2: World, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    message = "transformers.Trainer shards the data.*Write the loop yourself"
    check(world2, ValueError, message, by_trainer, str(tmp_path))
    world2.close()  # accelerate leaves a state of the process behind


@pytest.mark.by_day("pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_adapters_are_saved_as_on_one_device(world2: World, tmp_path: Path, plan: str) -> None:
    pytest.importorskip("peft")
    adapted(str(tmp_path / "one"), None)
    world2.run(adapted, str(tmp_path / "ranks"), PLANS[plan])
    same_directories(tmp_path / "ranks", tmp_path / "one")


# The guide


def run_guide(directory: str, part: slice) -> None:
    text = (Path(__file__).parents[1] / "docs/guide/huggingface.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    with contextlib.chdir(directory), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft, about transformers 6
        exec("".join(blocks[part]), {})


@pytest.mark.slow
def test_the_program_of_the_guide_runs(world2: World, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run_guide(str(tmp_path), slice(1))
    world2.run(run_guide, str(tmp_path), slice(1, None))
    assert {p.name for p in tmp_path.iterdir()} == {"hub", "exported", "adapter"}

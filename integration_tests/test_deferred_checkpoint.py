"""A deferred model is filled from files of transformers, shard by shard, never initialised."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import vescale
from vescale_ckpt import MismatchError, load_safetensors
from vescale_deferred import deferred_init, materialize, skip_init
from vescale_dtensor import Box, DTensor, InterleavedShard, local_boxes
from vescale_testing import World

from .plans import FOUR, TWO, Constraints, make_plan
from .training import whole

# Nothing here divides by all of 2, 4 and 16.
CONFIG: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 60,
    "tie_word_embeddings": True,
}


def llama(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(**{**CONFIG, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A directory with several files, and all tensors of the model that transformers loads."""
    import transformers

    directory = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    model: Any = llama()
    model.save_pretrained(directory, max_shard_size="40KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    return directory, tensors(loaded)


def tensors(model: Any) -> dict[str, Tensor]:
    assert model.lm_head.weight is model.model.embed_tokens.weight
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: whole(tensor).detach().clone() for name, tensor in named}


def fill_parallelized(directory: str, constraints: Constraints) -> dict[str, Tensor]:
    torch.manual_seed(1)  # what is loaded must not depend on it
    model = skip_init(vescale.deferred_init(llama))
    state = torch.get_rng_state()
    vescale.parallelize(make_plan(constraints), model)
    assert all(p.to_local().isnan().all() for p in model.parameters() if isinstance(p, DTensor))
    load_safetensors(directory, model)
    assert torch.equal(torch.get_rng_state(), state)
    return tensors(model)


def sharded(placement: Shard | InterleavedShard) -> Callable[..., Tensor]:
    """Return a maker of DTensors over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None

    def make(fqn: str, tensor: Tensor, read: Callable[[Box | None], Tensor]) -> Tensor:
        if not isinstance(tensor, nn.Parameter) or tensor.dim() < 2:
            return read(None)
        boxes = local_boxes(tensor.shape, mesh.shape, coordinate, (placement,))
        local = torch.cat([read(held.box) for held in boxes], placement.dim)
        return DTensor.from_local(local, mesh, (placement,), shape=tensor.shape)

    return make


PLACEMENTS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "interleaved": InterleavedShard(0, 2),
}


def fill_sharded(directory: str, placement: str) -> dict[str, Tensor]:
    model = skip_init(deferred_init(llama))
    materialize(model, make=sharded(PLACEMENTS[placement]))
    load_safetensors(directory, model)
    return tensors(model)


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert "model.rotary_emb.inv_freq" in found  # no checkpoint holds it
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["zero3", "tp"])
def test_a_plan_fills_a_deferred_model_from_safetensors(
    world2: World, pretrained: tuple[Path, dict[str, Tensor]], kind: str
) -> None:
    directory, expected = pretrained
    for found in world2.run(fill_parallelized, str(directory), TWO[kind]):
        check(found, expected)


@pytest.mark.slow
def test_a_plan_of_two_kinds_fills_a_deferred_model_from_safetensors(
    world4: World, pretrained: tuple[Path, dict[str, Tensor]]
) -> None:
    directory, expected = pretrained
    for found in world4.run(fill_parallelized, str(directory), FOUR["tp-zero3"]):
        check(found, expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_shards_of_any_kind_are_filled_from_safetensors(
    world2: World, pretrained: tuple[Path, dict[str, Tensor]], placement: str
) -> None:
    directory, expected = pretrained
    for found in world2.run(fill_sharded, str(directory), placement):
        check(found, expected)


def test_a_tensor_that_the_files_lack_is_an_error_that_names_it(
    pretrained: tuple[Path, dict[str, Tensor]],
) -> None:
    directory, _ = pretrained
    model = materialize(skip_init(deferred_init(llama, num_hidden_layers=3)))
    name = r"missing in the checkpoint: model\.layers\.2\.mlp\.up_proj\.weight"
    with pytest.raises(MismatchError, match=name):
        load_safetensors(directory, model)


def test_tensors_that_the_files_lack_can_be_constructed(
    pretrained: tuple[Path, dict[str, Tensor]],
) -> None:
    directory, expected = pretrained
    torch.manual_seed(2)
    ordinary = tensors(llama(num_hidden_layers=3))
    torch.manual_seed(2)
    model = deferred_init(llama, num_hidden_layers=3)
    materialize(skip_init(model, fqns=expected.keys() & model.state_dict().keys()))
    with pytest.warns(
        UserWarning, match=r"missing in the checkpoint, left as it is: model\.layers"
    ):
        load_safetensors(directory, model, strict=False)
    check(tensors(model), {**ordinary, **expected})


def test_a_checkpoint_of_a_training_run_fills_a_deferred_model(
    world2: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    (saved, _) = world2.run(save, path)
    for found in world2.run(fill_from_checkpoint, path):
        check(found, saved)


def save(path: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = llama()
    vescale.parallelize(make_plan(TWO["tp"]), model)
    vescale.save(path, {"model": model})
    return tensors(model)


def fill_from_checkpoint(path: str) -> dict[str, Tensor]:
    model = skip_init(vescale.deferred_init(llama))
    vescale.parallelize(make_plan(TWO["zero3"]), model)
    vescale.load(path, {"model": model})
    return tensors(model)


_MEASURE = """
import json, resource, sys
import torch
from integration_tests.test_deferred_checkpoint import CONFIG, llama
from vescale_ckpt import load_safetensors
from vescale_deferred import deferred_init, materialize, skip_init

def peak_nbytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

directory, changes = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
# What runs away fails here, and does not take the machine along.
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
deferred_init(llama, **CONFIG)  # imports everything
before = peak_nbytes()
model = materialize(skip_init(deferred_init(llama, **changes)))
load_safetensors(directory, model)
nbytes = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"grown": peak_nbytes() - before, "model": nbytes}))
"""


@pytest.mark.slow
def test_filling_takes_little_more_memory_than_the_model(tmp_path: Path) -> None:
    changes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 20_000}
    model: Any = llama(**changes)
    model.save_pretrained(tmp_path)
    arguments = [str(tmp_path), json.dumps(changes)]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["model"] > 200e6
    assert figures["grown"] < figures["model"] + 64e6

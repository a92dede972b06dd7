"""Finetune a model of the hub's format: its safetensors files go straight into the shards.

``finetune.py DIRECTORY`` takes what ``save_pretrained`` or the hub has; each rank reads the bytes
of its own shards. Without a directory a small Llama is written to ``pretrained/`` first.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import vescale
import vescale_ckpt
from vescale_deferred import skip_init


def small_model(directory: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=256,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Bytes of a text in pieces of equal length; a data set of HuggingFace serves as well."""

    def __init__(self, text: str, length: int = 32) -> None:
        tokens = torch.tensor([*text.encode()])
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "pretrained")
    dataset = Text(Path(__file__).read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    model = skip_init(vescale.deferred_init(AutoModelForCausalLM.from_config, config))
    plan = vescale.generate_plan(model, {"batch.global_size": 8, "batch.shuffle": True})
    model, optimizer, loader = vescale.parallelize(
        plan, model, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), dataset=dataset
    )
    vescale_ckpt.load_safetensors(directory, model)
    for epoch in range(2):
        losses: list[float] = []
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    if len(sys.argv) == 1 and not Path("pretrained").exists():
        sys.exit(
            "expected the directory of a pretrained model; `python finetune.py --make` writes one"
        )
    if sys.argv[1:] == ["--make"]:
        small_model(Path("pretrained"))
    else:
        main()

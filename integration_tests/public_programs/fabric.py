"""Scripts over Lightning Fabric."""

from __future__ import annotations

from . import data
from .program import DP, PP, TP, ZERO3, Program, Swap, instead

_ISSUES = '    if issues:\n        raise ValueError("\\n".join(issues))\n'

LITGPT = Program(
    repository="Lightning-AI/litgpt",
    commit="26857050fe3ff627cd714fe92f5838f51a3d5efa",
    script="litgpt/pretrain.py",
    paths=(".",),
    edits=(
        instead(
            "model = torch.compile(model)\nmodel = fabric.setup(model)",
            "import vescale",
            "example = torch.zeros(4, model.max_seq_length, dtype=torch.long)",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=example)",
            "train_dataloader, val_dataloader = get_dataloaders(",
            "    fabric, data, tokenizer, train, model.max_seq_length",
            ")",
            "model, train_dataloader = vescale.parallelize(plan, model, dataset=train_dataloader)",
        ),
        instead(
            "train_dataloader, val_dataloader = get_dataloaders(fabric, data, tokenizer, train, "
            "model.max_seq_length)\n"
            "train_dataloader, val_dataloader = fabric.setup_dataloaders(train_dataloader, "
            "val_dataloader)",
            "",
        ),
        instead("with fabric.no_backward_sync(model, enabled=is_accumulating):", "if True:"),
        instead(
            "fabric.clip_gradients(model, optimizer, max_norm=train.max_norm)",
            "torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_norm)",
        ),
    ),
    smaller=(
        Swap(  # What the command line says elsewhere.
            _ISSUES,
            _ISSUES + "\n\n"
            "from tiny_tokens import Tokens\n"
            'setup("pythia-14m", Config.from_name("pythia-14m", n_layer=2, n_embd=32, '
            "block_size=16, padded_vocab_size=64), precision='64-true', data=Tokens(), "
            "train=TrainArgs(save_interval=None, global_batch_size=8, micro_batch_size=4, "
            "max_tokens=10000, max_norm=1.0, lr_warmup_steps=0), eval=EvalArgs(max_iters=1), "
            "devices=1, logger_name='csv')\n",
        ),
    ),
    requires=("lightning", "torchmetrics", "jsonargparse", "psutil"),
    prepare=data.token_modules,
    environment={"TORCHDYNAMO_DISABLE": "1"},
    plans=(DP, ZERO3, TP, PP),
    local_losses=True,
    note="`fabric.setup` and what needs it go; `fabric.backward`, `fabric.setup_optimizers`, "
    "logging and printing stay.",
)

PROGRAMS = (LITGPT,)

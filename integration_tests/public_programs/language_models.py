"""Language models of other repositories."""

from __future__ import annotations

from . import data
from .program import DP, PP, TP, ZERO3, Program, Swap, after, before, instead

GPT_FROM_SCRATCH = Program(
    repository="rasbt/LLMs-from-scratch",
    commit="28c65cdfbc3338e2e040016eea4b7fdf556e4d57",
    script="ch05/01_main-chapter-code/gpt_train.py",
    edits=(
        before(
            "# Train model",
            "import vescale",
            "example = torch.zeros(2, gpt_config['context_length'], dtype=torch.long)",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=example)",
            "adamw = lambda model: torch.optim.AdamW(",
            "    model.parameters(), settings['learning_rate'], weight_decay=settings['weight_decay']",
            ")",
            "model, optimizer, train_loader = vescale.parallelize(",
            "    plan, model, adamw, dataset=train_loader",
            ")",
        ),
    ),
    smaller=(
        Swap('"vocab_size": 50257', '"vocab_size": 128'),
        Swap('"context_length": 256', '"context_length": 16'),
        Swap('"emb_dim": 768', '"emb_dim": 32'),
        Swap('"n_heads": 12', '"n_heads": 4'),
        Swap('"n_layers": 12', '"n_layers": 2'),
        Swap('"batch_size": 2', '"batch_size": 4'),
    ),
    stubs=("matplotlib", "matplotlib.pyplot"),
    prepare=data.story,
    plans=(DP, ZERO3, TP, PP),
    local_losses=True,
)

X_TRANSFORMERS = Program(
    repository="lucidrains/x-transformers",
    commit="9252ed7838021ee61e6c5be0930b3a9a88efdf06",
    script="train_enwik8.py",
    paths=(".",),
    edits=(
        before(
            "optim = torch.optim.Adam(model.parameters(), lr=learning_rate)",
            "import vescale",
            "example = torch.zeros(2, seq_len + 1, dtype=torch.long)",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=example)",
            "model = vescale.parallelize(plan, model)",
            "rank, size = vescale.data_parallel_rank(model), plan.data_parallel.size",
        ),
        instead(
            "loss = model(next(train_loader))",
            "loss = model(next(train_loader).chunk(size)[rank])",
        ),
        instead(
            "loss = model(next(val_loader))", "loss = model(next(val_loader).chunk(size)[rank])"
        ),
    ),
    smaller=(
        Swap("[int(90e6)]", "[int(16e3)]"),
        Swap("dim = 512", "dim = 32"),
        Swap("depth = 6", "depth = 2"),
        Swap("heads = 8", "heads = 4"),
        Swap("accelerator = Accelerator(cpu=cpu)", "accelerator = Accelerator()"),
        Swap("device = accelerator.device", "device = 'cpu'"),
        Swap("model, optim, train_loader, val_loader = accelerator.prepare(", "_ = ("),
        Swap(
            "accelerator.backward(loss / gradient_accumulate_every)",
            "(loss / gradient_accumulate_every).backward()",
        ),
        Swap("accelerator.clip_grad_norm_(", "torch.nn.utils.clip_grad_norm_("),
        Swap("i % generate_every == 0", "False"),
        Swap("fire.Fire(train)", "train(seq_len=16)"),
    ),
    stubs=("wandb", "fire", "accelerate", "loguru"),
    prepare=data.enwik8,
    plans=(DP, ZERO3, TP, PP),
)

PROGRAMS = (GPT_FROM_SCRATCH, X_TRANSFORMERS)

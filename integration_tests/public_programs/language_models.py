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
            "    model.parameters(), settings['learning_rate'],",
            "    weight_decay=settings['weight_decay'],",
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
    undrawn=(Swap('"drop_rate": 0.1', '"drop_rate": 0.0'),),
    stubs=("matplotlib", "matplotlib.pyplot"),
    requires=("requests",),
    prepare=data.story,
    plans=(DP, ZERO3, TP, PP),
    local_losses=True,
    note="Under pp 2 it is compared without dropout, which is drawn for micro-batches, one after "
    "the other.",
)

X_TRANSFORMERS = Program(
    repository="lucidrains/x-transformers",
    commit="9252ed7838021ee61e6c5be0930b3a9a88efdf06",
    script="train_enwik8.py",
    paths=(".",),
    edits=(
        instead(
            "model, optim, train_loader, val_loader = accelerator.prepare(\n"
            "model, optim, train_loader, val_loader\n)",
            "import vescale",
            "example = torch.zeros(2, seq_len + 1, dtype=torch.long)",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=example)",
            "adam = lambda model: torch.optim.Adam(model.parameters(), lr=learning_rate)",
            "model, optim = vescale.parallelize(plan, model, adam)",
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
        Swap("i % generate_every == 0", "False"),
        Swap("fire.Fire(train)", "train(seq_len=16, cpu=True)"),
    ),
    stubs=("wandb", "fire"),
    requires=("accelerate", "einops", "einx", "loguru", "packaging", "torch-einops-utils", "tqdm"),
    prepare=data.enwik8,
    plans=(DP, ZERO3, TP, PP),
)

ACCELERATE = Program(
    repository="huggingface/accelerate",
    commit="16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    script="examples/by_feature/gradient_accumulation_for_autoregressive_models.py",
    edits=(
        instead(
            "model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = "
            "accelerator.prepare(\n"
            "model, optimizer, train_dataloader, eval_dataloader, lr_scheduler\n)",
            "import vescale",
            "plan = vescale.generate_plan(model, CONSTRAINTS)",
            "model, optimizer, lr_scheduler, train_dataloader = vescale.parallelize(",
            "    plan, model, lambda model: AdamW(model.parameters(), lr=lr),",
            "    get_constant_schedule, train_dataloader,",
            ")",
        ),
        instead("model.no_sync", "contextlib.nullcontext"),
        after(
            "num_items_in_batch = accelerator.gather(local_num_items_in_batch).sum().item()",
            "num_items_in_batch *= plan.data_parallel.size / accelerator.num_processes",
        ),
        instead(
            "loss = loss * gradient_accumulation_steps * accelerator.num_processes",
            "loss = loss * gradient_accumulation_steps",
        ),
    ),
    argv=("--cpu", "--per_device_batch_size=8"),
    smaller=(
        Swap("set_seed(seed)", "set_seed(seed); from tiny_sentences import get_dataloaders"),
        Swap(
            'AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM-360M")',
            "AutoModelForCausalLM.from_config(__import__('transformers').LlamaConfig("
            "hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, "
            "num_key_value_heads=2, vocab_size=64))",
        ),
        Swap('"lr": 2e-5', '"lr": 1e-2'),
    ),
    stubs=("datasets",),
    requires=("accelerate", "transformers"),
    prepare=data.sentences,
    plans=(DP, ZERO3, TP, PP),
    float32=True,
    note="HuggingFace's loop without a `Trainer`, which counts the tokens of all ranks itself. "
    "Its factors for gradients that DDP averages go: the loss is the global batch's. A loss "
    "divided by hand needs rows of one length on all data-parallel ranks.",
)

RUN_CLM = Program(
    # A copy of transformers 4.57.3 that renamed its packages; the original is a clone of 2 GB.
    repository="feisenyu/transformers_4573",
    commit="e9d73c31189a2235385bbaf4be9224d9d5c8a1fc",
    script="examples/pytorch/language-modeling/run_clm_no_trainer.py",
    edits=(
        before(
            "# Optimizer",
            "import vescale",
            "plan = vescale.generate_plan(model, CONSTRAINTS)",
            "model, train_dataloader = vescale.parallelize(plan, model, dataset=train_dataloader)",
        ),
        instead(
            "model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = "
            "accelerator.prepare(\n"
            "model, optimizer, train_dataloader, eval_dataloader, lr_scheduler\n)",
            "",
        ),
    ),
    argv=(
        "--train_file=words.txt",
        "--validation_file=words.txt",
        "--config_name=tiny",
        "--tokenizer_name=tiny",
        "--block_size=16",
        "--per_device_train_batch_size=8",
        "--learning_rate=1e-2",
        "--seed=0",
    ),
    smaller=(
        Swap("transformers_4573", "transformers"),
        Swap("huggingface_hub_4573", "huggingface_hub"),
        Swap("DistributedType.TPU", "DistributedType.XLA"),
    ),
    requires=("accelerate", "datasets", "transformers"),
    prepare=data.tiny_llama,
    environment={"HF_HOME": "cache", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"},
    plans=(DP, ZERO3, TP, PP),
    float32=True,
    note="HuggingFace's own loop without a `Trainer`, in a copy of transformers 4.57.3. "
    "`accelerator.prepare` goes; `accelerator.accumulate`, `accelerator.backward` and the "
    "trackers stay.",
)

PROGRAMS = (GPT_FROM_SCRATCH, X_TRANSFORMERS, ACCELERATE, RUN_CLM)

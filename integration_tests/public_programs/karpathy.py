"""nanoGPT and its relatives."""

from __future__ import annotations

from . import data
from .program import DP, PP, TP, ZERO3, Program, Swap, after, before, instead

NANOGPT = Program(
    repository="karpathy/nanoGPT",
    commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    script="train.py",
    edits=(
        after("import torch", "import vescale"),
        instead("ddp = int(os.environ.get('RANK', -1)) != -1 # is this a ddp run?", "ddp = False"),
        before(
            "return x, y",
            "rank, size = vescale.data_parallel_rank(model), plan.data_parallel.size",
            "x, y = x.chunk(size)[rank], y.chunk(size)[rank]",
        ),
        after(
            "model.to(device)",
            "example = torch.zeros(4, block_size, dtype=torch.long)",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=(example, example))",
            "model = vescale.parallelize(plan, model)",
        ),
    ),
    argv=(
        "--device=cpu",
        "--compile=False",
        "--dtype=float32",
        "--dataset=characters",
        "--n_layer=2",
        "--n_head=4",
        "--n_embd=32",
        "--block_size=16",
        "--batch_size=4",
        "--gradient_accumulation_steps=2",
        "--eval_iters=2",
        "--warmup_iters=2",
        "--bias=True",
    ),
    prepare=data.characters,
    plans=(DP, ZERO3, TP, PP),
)

LLAMA2_C = Program(
    repository="karpathy/llama2.c",
    commit="350e04fe35433e6d2941dce5a1f53308f87058eb",
    script="train.py",
    edits=(
        after("import torch", "import vescale"),
        instead(
            'ddp = int(os.environ.get("RANK", -1)) != -1  # is this a ddp run?', "ddp = False"
        ),
        after(
            "model.to(device)",
            "example = torch.zeros(4, max_seq_len, dtype=torch.long)",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=(example, example))",
            "model = vescale.parallelize(plan, model)",
            "rank, size = vescale.data_parallel_rank(model), plan.data_parallel.size",
            "batches_of = iter_batches",
            "def iter_batches(split):",
            "    return ([t.chunk(size)[rank] for t in each] for each in batches_of(split=split))",
        ),
        instead(
            "rank = dist.get_rank() if dist.is_initialized() else 0",
            "rank = 0",
            file="tinystories.py",
        ),
    ),
    argv=(
        "--device=cpu",
        "--compile=False",
        "--dtype=float32",
        "--vocab_source=custom",
        "--vocab_size=64",
        "--dim=32",
        "--n_layers=2",
        "--n_heads=4",
        "--n_kv_heads=2",
        "--max_seq_len=16",
        "--batch_size=4",
        "--gradient_accumulation_steps=2",
        "--eval_iters=2",
        "--warmup_iters=2",
    ),
    stubs=("sentencepiece",),
    prepare=data.stories,
    plans=(DP, ZERO3, TP, PP),
    local_losses=True,
    note="Its loader draws another order on every rank; `rank = 0` has all draw the same one.",
)

MINGPT = Program(
    repository="karpathy/minGPT",
    commit="37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    script="projects/adder/adder.py",
    paths=(".",),
    edits=(
        before(
            "# construct the trainer object",
            "import vescale",
            "example = tuple(t[None] for t in train_dataset[0])",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=example)",
            "model = vescale.parallelize(plan, model)",
        ),
    ),
    argv=("--trainer.num_workers=0", "--trainer.batch_size=8"),
    plans=(TP, PP),
    note="Its `Trainer` makes the loader itself, so data parallelism needs a line there.",
)

MAKEMORE = Program(
    repository="karpathy/makemore",
    commit="988aa59e4d8fefa526d06f3b453ad116258398d4",
    script="makemore.py",
    edits=(
        before(
            "# init optimizer",
            "import vescale",
            "example = tuple(t[None] for t in train_dataset[0])",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=example)",
            "model = vescale.parallelize(plan, model)",
            "rank, size = vescale.data_parallel_rank(model), plan.data_parallel.size",
        ),
        before("# feed into the model", "X, Y = X.chunk(size)[rank], Y.chunk(size)[rank]"),
    ),
    argv=("--num-workers=0", "-b=8", "--n-layer=2", "--n-embd=16", "--n-embd2=16"),
    stubs=("torch.utils.tensorboard",),
    prepare=data.names,
    plans=(DP, ZERO3, TP, PP),
)

NANOCHAT = Program(
    repository="karpathy/nanochat",
    commit="92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
    script="scripts/base_train.py",
    paths=(".",),
    edits=(
        after(
            "ddp, ddp_rank, ddp_local_rank, ddp_world_size, device = compute_init(device_type)",
            "ddp_world_size = 1",
        ),
        instead(
            "model = torch.compile(model, dynamic=False) # the inputs to model will never change "
            "shape so dynamic=False is safe",
            "import vescale",
            "example = torch.zeros(4, args.max_seq_len, dtype=torch.long)",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=(example, example))",
            "model = vescale.parallelize(plan, model)",
            "rank, size = vescale.data_parallel_rank(model), plan.data_parallel.size",
        ),
        before(
            "x, y, dataloader_state_dict = next(train_loader) "
            "# kick off load of the very first batch of data",
            "train_loader = (",
            "    (x.chunk(size)[rank], y.chunk(size)[rank], at) for x, y, at in train_loader",
            ")",
        ),
        instead(
            "if dist.is_available() and dist.is_initialized():",
            "if False:",
            file="nanochat/optim.py",
        ),
    ),
    argv=(
        "--device-type=cpu",
        "--depth=2",
        "--aspect-ratio=16",
        "--head-dim=8",
        "--max-seq-len=16",
        "--device-batch-size=4",
        "--total-batch-size=128",
        "--num-iterations=5",
        "--eval-every=-1",
        "--core-metric-every=-1",
        "--sample-every=-1",
        "--window-pattern=L",
    ),
    smaller=(
        Swap(
            "from nanochat.dataloader import tokenizing_distributed_data_loader_bos_bestfit, "
            "tokenizing_distributed_data_loader_with_state_bos_bestfit",
            "from tiny_documents import (without_state as "
            "tokenizing_distributed_data_loader_bos_bestfit, with_state as "
            "tokenizing_distributed_data_loader_with_state_bos_bestfit)",
        ),
        Swap("vocab_size = tokenizer.get_vocab_size()", "vocab_size = 64"),
    ),
    stubs=("wandb", "nanochat.tokenizer", "nanochat.engine", "scripts.base_eval"),
    requires=("filelock",),
    prepare=data.packed_documents,
    environment={"TORCHDYNAMO_DISABLE": "1"},
    plans=(DP, ZERO3, TP, PP),
    float32=True,
    note="Its Muon reduces gradients over ranks itself; `if False:` has it not.",
)

PROGRAMS = (NANOGPT, LLAMA2_C, MINGPT, MAKEMORE, NANOCHAT)

"""pytorch/examples."""

from __future__ import annotations

from . import data
from .program import DP, PP, TP, ZERO3, Program, Swap, after, before, instead

REPOSITORY = "pytorch/examples"
COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"

WORD_LANGUAGE_MODEL = Program(
    repository=REPOSITORY,
    commit=COMMIT,
    script="word_language_model/main.py",
    edits=(
        before(
            "criterion = nn.NLLLoss()",
            "import vescale",
            "example = train_data[:args.bptt]",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=example)",
            "model = vescale.parallelize(plan, model)",
        ),
    ),
    argv=(
        "--data=data/words",
        "--model=Transformer",
        "--emsize=16",
        "--nhid=16",
        "--batch_size=4",
        "--use-optimizer",
        "--lr=0.01",
    ),
    prepare=data.words,
    plans=(TP, PP),
    note="Batches are (time, rows), of which data parallelism would need the rows cut.",
)

TIME_SEQUENCES = Program(
    repository=REPOSITORY,
    commit=COMMIT,
    script="time_sequence_prediction/train.py",
    edits=(
        before(
            "criterion = nn.MSELoss()",
            "import vescale",
            "plan = vescale.generate_plan(seq, CONSTRAINTS)",
            "seq = vescale.parallelize(plan, seq)",
            "rank, size = vescale.data_parallel_rank(seq), plan.data_parallel.size",
            "input, target = input.chunk(size)[rank], target.chunk(size)[rank]",
        ),
    ),
    smaller=(
        Swap("future = 1000", "future = 5"),
        Swap("torch.load('traindata.pt')", "torch.load('traindata.pt', weights_only=False)"),
    ),
    stubs=("matplotlib", "matplotlib.pyplot"),
    prepare=data.sines,
    plans=(DP, ZERO3),
    local_losses=True,
    note="LSTM cells and LBFGS, which calls the model several times a step.",
)

REGRESSION = Program(
    repository=REPOSITORY,
    commit=COMMIT,
    script="regression/main.py",
    edits=(
        after(
            "fc = torch.nn.Linear(W_target.size(0), 1)",
            "import vescale",
            "plan = vescale.generate_plan(fc, CONSTRAINTS)",
            "fc = vescale.parallelize(plan, fc)",
            "rank, size = vescale.data_parallel_rank(fc), plan.data_parallel.size",
        ),
        instead(
            "batch_x, batch_y = get_batch()",
            "batch_x, batch_y = [t.chunk(size)[rank] for t in get_batch()]",
        ),
    ),
    plans=(DP, ZERO3),
    local_losses=True,
    note="It has no optimizer: `param.data.add_(...)` by hand.",
)

SINGLE_GPU = Program(
    repository=REPOSITORY,
    commit=COMMIT,
    script="distributed/ddp-tutorial-series/single_gpu.py",
    edits=(
        after(
            "train_data = prepare_dataloader(dataset, batch_size)",
            "import vescale",
            "plan = vescale.generate_plan(model, CONSTRAINTS)",
            "sgd = lambda model: torch.optim.SGD(model.parameters(), lr=1e-3)",
            "model, optimizer, train_data = vescale.parallelize(",
            "    plan, model, sgd, dataset=train_data",
            ")",
        ),
    ),
    argv=("1", "5"),
    smaller=(
        Swap("device = 0  # shorthand for cuda:0", "device = 'cpu'"),
        # It classifies into one class, with a loss of 0; a target of ones, to have a loss.
        Swap("F.cross_entropy(output, targets)", "F.mse_loss(output, targets)"),
    ),
    plans=(DP, ZERO3),
    local_losses=True,
    note="`parallelize` takes its ready `DataLoader`, so the loop stays as it is.",
)

FSDP2 = Program(
    repository=REPOSITORY,
    commit=COMMIT,
    script="distributed/FSDP2/example.py",
    edits=(
        before(
            "optim = torch.optim.Adam(model.parameters(), lr=1e-2)",
            "import vescale",
            "example = torch.zeros(2, seq_len, dtype=torch.long)",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=example)",
            "model = vescale.parallelize(plan, model)",
            "rank, size = vescale.data_parallel_rank(model), plan.data_parallel.size",
        ),
        instead("loss = model(x).sum()", "loss = model(x.chunk(size)[rank]).sum() * size"),
    ),
    smaller=(  # It is a program of FSDP2; without it, it is one of one device.
        Swap("    _min_gpu_count = 2\n", "    os.environ.setdefault('LOCAL_RANK', '0')\n"),
        Swap("if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:"),
        Swap("{_min_gpu_count}", ""),
        Swap(
            "if torch.accelerator.is_available():\n        device_type",
            "if False:\n        device_type",
        ),
        Swap("torch.distributed.init_process_group(backend=backend, device_id=device)", "pass"),
        Swap("n_layers=10", "n_layers=2"),
        Swap("vocab_size = 1024", "vocab_size = 64"),
        Swap("checkpointer.last_training_time is not None", "False"),
        Swap("checkpointer.last_training_time is None", "False"),
        Swap("checkpointer.load_model(model)", "pass"),
        Swap('torch.device("meta")', 'torch.device("cpu")'),
        Swap("fully_shard(layer, **fsdp_kwargs)", "pass"),
        Swap("fully_shard(model, **fsdp_kwargs)", "pass"),
        Swap("inspect_model(model)", "pass"),
    ),
    plans=(DP, ZERO3, TP),
    local_losses=True,
    float32=True,
    note="FSDP2's own calls go. The loop sums outputs, which are those of a rank's rows, while "
    "gradients are averaged: veScale warns, and `* size` mends it.",
)

PROGRAMS = (WORD_LANGUAGE_MODEL, TIME_SEQUENCES, REGRESSION, SINGLE_GPU, FSDP2)

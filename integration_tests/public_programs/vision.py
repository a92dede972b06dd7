"""Models of images."""

from __future__ import annotations

from . import data
from .program import DP, PP, TP, ZERO3, Program, Swap, after, before, instead

VIT = Program(
    repository="lucidrains/vit-pytorch",
    commit="69d24fe9e3024c0d4b02761123b8583a24ebed1e",
    script="train_vit_decorr.py",
    paths=(".",),
    edits=(
        instead(
            "vit, optim, dataloader = accelerator.prepare(vit, optim, dataloader)",
            "import vescale",
            "example = torch.zeros(2, 3, 32, 32)",
            "plan = vescale.generate_plan(vit, CONSTRAINTS, example_batch=example)",
            "adam = lambda model: Adam(model.parameters(), lr=LEARNING_RATE)",
            "vit, optim, dataloader = vescale.parallelize(plan, vit, adam, dataset=dataloader)",
        ),
    ),
    smaller=(
        Swap("dim = 128,", "dim = 32,"),
        Swap("depth = 6", "depth = 2"),
        Swap("heads = 8", "heads = 4"),
        Swap("dim_head = 64", "dim_head = 8"),
        Swap("mlp_dim = 128 * 4", "mlp_dim = 64"),
        Swap("BATCH_SIZE = 32", "BATCH_SIZE = 8"),
    ),
    stubs=("wandb",),
    requires=("accelerate", "einops"),
    prepare=data.images,
    plans=(DP, ZERO3, TP, PP),
    local_losses=True,
    note="`accelerator.prepare` goes; `accelerator.backward` and `accelerator.print` stay.",
)

TIMM = Program(
    repository="huggingface/pytorch-image-models",
    commit="aa4b5850c1543fa488abf260f18390eda46cf85d",
    script="train.py",
    edits=(
        after(
            "device = utils.init_distributed_device(args)",
            "args.distributed, args.rank, args.world_size = False, 0, 1",
        ),
        before(
            "# setup loss function",
            "import vescale",
            "example = torch.zeros(8, *data_config['input_size'])",
            "plan = vescale.generate_plan(model, CONSTRAINTS, example_batch=example)",
            "model, loader_train = vescale.parallelize(plan, model, dataset=loader_train)",
        ),
    ),
    argv=(
        "--data-dir=pictures",
        "--model=vit_tiny_patch16_224",
        "--model-kwargs",
        "depth=2",
        "embed_dim=32",
        "num_heads=4",
        "img_size=32",
        "--img-size=32",
        "--num-classes=4",
        "--batch-size=8",
        "--workers=1",
        "--no-prefetcher",
        "--no-aug",
        "--device=cpu",
        "--opt=adamw",
        "--lr=1e-3",
        "--warmup-epochs=0",
        "--epochs=2",
        "--smoothing=0",
        "--clip-grad=1",
    ),
    requires=("timm", "torchvision"),
    paths=(".",),
    prepare=data.pictures,
    plans=(DP, ZERO3, TP, PP),
    local_losses=True,
    note="Its task, its optimizer and its loader stay; the prefetcher, which makes batches on a "
    "GPU, is off. Compared without augmentation (`--no-aug`): ranks fetch their own rows only, so "
    "they draw other crops than one device.",
)

PROGRAMS = (VIT, TIMM)

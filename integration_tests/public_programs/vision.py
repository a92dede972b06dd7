"""Models of images."""

from __future__ import annotations

from . import data
from .program import DP, PP, TP, ZERO3, Program, Swap, instead

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

PROGRAMS = (VIT,)

"""Compare a plan with one device: initial values, activations, losses, gradients, parameters."""

from .report import (
    Divergence as Divergence,
    LevelResult as LevelResult,
    VerifyReport as VerifyReport,
)
from .verify import verify as verify

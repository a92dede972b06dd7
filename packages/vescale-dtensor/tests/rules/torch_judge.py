"""torch's brute-force judge of sharding rules; None where a version of torch has none.

It is private: seen in 2.13. Without it test_strategy_validation.py is skipped.
"""

from __future__ import annotations

from typing import Any

import torch

# Importing the database of operators forbids assigning to torch.backends, for the whole process.
_settings = getattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

judge: Any
LocalTensor: Any
LocalTensorMode: Any
why_not: str
try:
    from torch.distributed import _local_tensor
    from torch.distributed.tensor._ops import strategy_validation as judge

    LocalTensor, LocalTensorMode = _local_tensor.LocalTensor, _local_tensor.LocalTensorMode

    # What this package asks of it; another version may have renamed some.
    needed = (
        judge.SKIP_OPS, judge.extract_tensors_from_args, judge.extract_tensors_from_sample,
        judge.get_1d_input_placements_for_tensor, judge.get_aten_op_for_sample,
        judge._AtenFalsePositiveMitigations, judge._CaptureAtenOp, judge._check_ground_truth,
        judge._create_partial_input,
        judge._prepare_aten_mitigations,
        judge._validate_aten_with_mitigations, judge.validate_aten_combination,
    )  # fmt: skip
    why_not = ""
except (ImportError, AttributeError) as problem:
    judge = LocalTensor = LocalTensorMode = None
    why_not = f"torch {torch.__version__} has no judge of rules: {problem}"
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", _settings)

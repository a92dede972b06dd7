"""Decide how to run a model on many ranks.

Files, in the order in which a plan comes about:

- ``_generate.py``: the entry point, flat: workload, search, what would run, reasons
- ``_constraints.py``: what a person may fix, checked before anything else
- ``_workload.py``: what each block computes and keeps, from one forward on shapes
- ``cluster.py``, ``_machines/``: what the machines can do, declared or measured
- ``_candidates.py``: every combination of degrees, schedules and stages, as data
- ``_partition.py``: where the pipeline is cut, and what each of its ranks owns
- ``_prices/``: seconds and bytes of candidates, thousands of one kind at once
- ``_search.py``, ``_ranking.py``: scores and ranks all of them
- ``_runnable.py``: drops pipelines that the runtime would refuse
- ``_explanations/``: why the winner won, in words and pictures; which constraints exclude each
  other where nothing is left; what was priced besides
- ``_predict.py``, ``prediction.py``: the price of one plan that somebody gives
"""

from ._explanations.explanation import (
    Alternative as Alternative,
    Change as Change,
    Explanation as Explanation,
)
from ._generate import (
    explain_plan as explain_plan,
    generate_plan as generate_plan,
    generate_plans as generate_plans,
)
from ._predict import predict as predict
from .cluster import Cluster as Cluster
from .prediction import Breakdown as Breakdown, Prediction as Prediction, RankMemory as RankMemory

__version__ = "0.1.0"
__all__ = [
    "Alternative",
    "Breakdown",
    "Change",
    "Cluster",
    "Explanation",
    "Prediction",
    "RankMemory",
    "explain_plan",
    "generate_plan",
    "generate_plans",
    "predict",
]

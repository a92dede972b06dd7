"""Decide how to run a model on many ranks."""

from ._generate import generate_plan as generate_plan
from .cluster import Cluster as Cluster

__version__ = "0.1.0"
__all__ = ["Cluster", "generate_plan"]

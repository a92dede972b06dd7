"""Tensor parallelism on plain local tensors: shardings, and collectives at region borders."""

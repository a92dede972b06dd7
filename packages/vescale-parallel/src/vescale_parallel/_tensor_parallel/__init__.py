"""Tensor parallelism on plain local tensors: shardings, and collectives around regions."""

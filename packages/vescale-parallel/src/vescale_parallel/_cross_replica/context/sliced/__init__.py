"""Tensors of which a rank has a slice, and what code in and behind blocks computes of them."""

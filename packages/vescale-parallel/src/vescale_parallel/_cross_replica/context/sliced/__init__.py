"""Tensors of which a rank has a slice, and what code behind the blocks computes of them."""

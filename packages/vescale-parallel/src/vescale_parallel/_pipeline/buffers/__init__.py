"""Buffers that forward changes, where it runs in parts: of micro-batches, and of stages."""

from .of_stages import StageBuffers as StageBuffers

__all__ = ["StageBuffers"]

"""The sharding plan of a model whose bits do not depend on the number of ranks."""

from .in_chunks import propose_in_chunks as propose_in_chunks

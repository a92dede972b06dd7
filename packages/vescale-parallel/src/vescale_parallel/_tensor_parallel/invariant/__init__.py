"""The same bits on any number of tensor-parallel ranks.

[Note: invariant numerics] A sum that ranks share is cut into as many chunks as a plan says
(``numerics_chunks``, a power of two), on one device, too. Each chunk is computed by a call of
its own, of shapes that do not depend on the number of ranks, and chunks are added in pairs,
pairs of pairs, and so on: a tree. A rank has neighbouring chunks, so what it adds is a branch of
the tree, and ranks add the rest. Bits depend on the number of chunks, and not on that of ranks.

Where sums are cut: products of row-wise layers forward (input features), those of column-wise
layers backward (output features), and with ``tensor_parallel.sequence`` gradients of what every
rank has whole and applies to its own tokens: norms, biases of row-wise layers.

Products that sum over something whole are cut into the same chunks: how a kernel adds depends
on the shapes that it is given, and on where in memory they begin.
"""

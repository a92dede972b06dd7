"""Data parallelism and ZeRO: parameter groups, and a loader of which each rank reads its rows."""

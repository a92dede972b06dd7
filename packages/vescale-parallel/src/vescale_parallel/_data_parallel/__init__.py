"""Data parallelism and ZeRO: parameter groups, gathered, freed and reduced together."""

"""The ranks that save or load together, and who of them is missing."""

"""How far a comparison with one device reaches: to other flags, and to more blocks."""

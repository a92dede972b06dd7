"""How far a comparison with one device reaches: to other lengths, flags and blocks."""

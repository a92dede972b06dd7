"""How far a comparison with one device reaches: from few blocks to all."""

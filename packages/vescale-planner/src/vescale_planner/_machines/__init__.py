"""Numbers of machines: declared by name, or measured here."""

"""State around forward where it runs more often than on one device."""

"""What is said of a search: reasons, conflicts, what was priced besides, and pictures."""

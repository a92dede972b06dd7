"""The command line: questions that are answered before a GPU is rented."""

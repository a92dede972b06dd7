"""One call of the model, and its backward."""

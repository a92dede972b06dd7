"""What generation of transformers does outside of calls of the model."""

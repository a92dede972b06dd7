"""Vocabularies: rows of tables, and logits whose columns stay sharded up to the loss."""

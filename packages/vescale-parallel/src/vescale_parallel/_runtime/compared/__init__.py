"""What ranks are called with and compute with, compared between them."""

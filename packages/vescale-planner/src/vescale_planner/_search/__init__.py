"""What is searched: every candidate with its price, the best of which are first."""

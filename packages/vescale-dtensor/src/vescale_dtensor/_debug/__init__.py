"""For people: what a program sends, and where its elements are."""

"""What a call of an operator does: a rule's options, the cheapest of them, a local plan."""

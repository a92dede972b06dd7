"""The ranks that save or load together: messages, errors, who is missing, who sends what."""

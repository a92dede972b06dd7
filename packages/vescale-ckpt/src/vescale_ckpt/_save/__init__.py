"""From a state to a committed checkpoint."""

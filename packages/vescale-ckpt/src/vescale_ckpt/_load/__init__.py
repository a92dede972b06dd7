"""From a committed checkpoint into a state."""

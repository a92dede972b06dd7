"""What was decided, as data: sizes, policies and marks, checked when they are made."""

"""The distributed tensor, and what makes one."""

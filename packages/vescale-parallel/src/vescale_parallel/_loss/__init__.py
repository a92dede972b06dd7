"""The loss of one device from parts of its batch."""

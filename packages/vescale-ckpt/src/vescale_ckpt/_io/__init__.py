"""Bytes to and from disks and object stores."""

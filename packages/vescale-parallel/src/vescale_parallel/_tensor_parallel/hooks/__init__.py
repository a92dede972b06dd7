"""Hooks of users, which see what one device has."""

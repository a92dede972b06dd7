"""Random numbers in forward: each rank draws its part of what one device draws."""

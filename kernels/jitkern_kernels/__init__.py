"""Compiled kernels of jitkern: a cache that jitkern searches. Nothing here is imported."""

"""Gradient of routing weights on the input."""

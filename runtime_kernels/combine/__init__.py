"""Weighted sum over the experts of a token."""

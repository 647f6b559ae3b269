"""Gradient of the input row of each pair."""

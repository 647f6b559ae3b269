"""Scores, top-k and routing weights."""

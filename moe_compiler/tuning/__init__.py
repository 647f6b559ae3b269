"""Tiles found by measuring: candidates, the search, the table that keeps them, and how they reach a chain."""

"""Gradients of the expert weights."""

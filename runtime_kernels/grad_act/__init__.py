"""Gradient through the down projection and the activation."""

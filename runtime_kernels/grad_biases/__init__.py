"""Gradients of the expert biases."""

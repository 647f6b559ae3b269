"""First expert matmuls and the activation."""

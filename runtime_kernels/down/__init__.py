"""Second expert matmul."""

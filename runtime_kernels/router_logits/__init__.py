"""The router's matmul."""

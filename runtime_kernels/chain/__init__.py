"""A chain of kernel launches as one operator that carries its whole program."""

"""Which MoE classes of the installed transformers are rewritten, and why the others are not: see __main__."""

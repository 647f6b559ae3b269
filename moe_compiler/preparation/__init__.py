"""MoE code that can never become one graph, replaced by an equivalent that can: `prepare` and what it is made of."""

"""All experts of a block: differentiable operator, CPU loop, composition of stages."""

"""A chain on CUDA: allocate, launch in order, free each intermediate buffer after its last use.

Memory freed inside the chain may be given to a later launch of it. That is safe with PDL too: every kernel waits
before it writes, and a wait that returns means that all earlier grids of the chain are complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_compiler.runtime_kernels.chain.prepared import Value, flatten, prepare
from moe_compiler.runtime_kernels.stage import is_empty


class KernelLaunchError(RuntimeError):
    """A kernel of a chain could not be compiled or launched; `kernel` is its name, the cause is chained."""

    def __init__(self, chain: str, variant: str, kernel: str, cause: BaseException) -> None:
        super().__init__(
            f"chain {chain!r}, variant {variant!r}: kernel {kernel} failed: {type(cause).__name__}: {cause}"
        )
        self.kernel = kernel
        self.cause = cause


def run(tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    """Run the program on the current stream. Raises ProgramError for a faulty program, KernelLaunchError."""
    program = prepare(text)
    values, sizes = program.bind(tensors)
    variant = program.variant(sizes)
    device = tensors[0].device
    # With no tokens some launches are skipped, so a launch's predecessor is not the planned one.
    pdl_allowed = program.tokens(sizes) != 0
    for launch in variant.launches:
        outs: dict[str, Value] = {}
        work = False
        for parameter, buffer in launch.outs:
            out = values[buffer.name] = outs[parameter] = buffer.allocate(sizes, values, device)
            work = work or not is_empty(out)
        if work:
            ins = {parameter: None if name is None else values[name] for parameter, name in launch.ins}
            try:
                launch.kernel.launch(outs, ins, launch.attrs, pdl=launch.pdl and pdl_allowed)
            except Exception as error:
                raise KernelLaunchError(program.name, variant.name, launch.kernel.name, error) from error
        for name in launch.dead:
            del values[name]
    return flatten([values[name] for name in program.outputs])

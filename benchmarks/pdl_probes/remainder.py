"""P8 and P9: the attribute outside of our chains.

P8: a user's Triton kernels, launched with the attribute, before and after torch.compile. P9: Inductor's own attribute
(`triton.enable_pdl`), in three ways: what the code that it generates does, whether results stay what they are without
it, and what it gains around a block of ours. In the two patterns a kernel triggers after its last load and computes on
for a while before it stores; behind it stand kernels that Inductor takes for unrelated, by the names of buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.pdl_probes.kernels import replayed, wait_for
from benchmarks.timing import captured, device_us, median
from moe_compiler import timing
from moe_compiler.demo import backend_or_function
from moe_compiler.graph_edges import read_edges
from moe_compiler.testing import examples

ROWS, COLUMNS = 512, 1024
LONG = 60
BLOCK = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}


@triton.jit
def _user_kernel(source, target, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.extra.cuda.gdc_wait()
    values = tl.load(source + at)
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(target + at, values + 1)


def _two_user_kernels(x: Tensor) -> Tensor:
    middle, out = torch.empty_like(x), torch.empty_like(x)
    grid = (x.numel() // 1024,)
    _user_kernel[grid](x, middle, 1024, launch_pdl=True)
    _user_kernel[grid](middle, out, 1024, launch_pdl=True)
    return out


def user_kernels() -> list[dict[str, Any]]:
    """P8: programmatic edges between two kernels of a user's, in eager and through Inductor."""
    x = torch.zeros(1 << 15, dtype=torch.int32, device="cuda")
    found = []
    for what, call in (("eager", _two_user_kernels), ("torch.compile", torch.compile(_two_user_kernels))):
        torch._dynamo.reset()
        edges = read_edges(replayed(lambda call=call: call(x)))  # type: ignore[misc]
        programmatic = sum(edge.programmatic for edge in edges)
        found.append(
            {
                "probe": "P8",
                "code": f"two kernels of a user's with launch_pdl=True, {what}",
                "kernels": 2,
                "attribute": programmatic,
                "of them without a wait": "",
                "differing": int((call(x) != 2).sum()),
                "verdict": "kept" if programmatic else "dropped",
            }
        )
    return found


def _long(x: Tensor) -> Tensor:
    """One load, much arithmetic, one store; close values do not run together."""
    y = x
    for _ in range(LONG):
        y = torch.sin(y + x)
    return y


def scatter(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """zeros, then index_add: the usual end of a block of experts. Each row has a target of its own: sums are exact."""
    rows = _long(x)
    out = torch.zeros_like(x).index_add(0, ids, rows)
    again = torch.zeros_like(x).index_add(0, ids, torch.softmax(out, 1))
    return rows, again


def reuse(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Zeros in memory that the kernel before them still reads, which Inductor knows by another name."""
    first = torch.zeros_like(x).index_add(0, ids, _long(x))
    sums = first.sum(1)
    second = torch.zeros_like(x).index_add(0, ids, _long(x + sums.unsqueeze(1)))
    return sums, second


def kernels_of(code: str) -> list[str]:
    """The sources of the Triton kernels in a file that Inductor generated."""
    return [part.split("''', device_str=")[0] for part in code.split("async_compile.triton(")[1:]]


def pattern(function: Callable[..., tuple[Tensor, ...]], replays: int) -> dict[str, Any]:
    """P9: one pattern with and without the attribute, in one graph, on inputs that change from replay to replay."""
    from torch._inductor.utils import run_and_get_code

    x = torch.rand(ROWS, COLUMNS, device="cuda")
    ids = torch.randperm(ROWS, device="cuda")
    ways: dict[bool, Callable[..., tuple[Tensor, ...]]] = {}
    code = ""
    for pdl in (False, True):
        ways[pdl] = torch.compile(function, options={"triton.enable_pdl": pdl}, dynamic=False)
        # Without caches, so that there is code to read; what the reset in there drops is compiled again below.
        with torch.compiler.config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(ways[pdl], x, ids)
        code = "\n".join(codes)
    sources = kernels_of(code)
    attributed = [source for source in sources if "'launch_pdl': True" in source]
    waitless = [source for source in attributed if "gdc_wait" not in source]
    differing = torch.zeros((), dtype=torch.int32, device="cuda")

    def call() -> None:
        x.add_(0.37).remainder_(3.0)
        on, off = ways[True](x, ids), ways[False](x, ids)
        for a, b in zip(on, off, strict=True):
            # Far above what a rounding could be, far below what the values of another replay are away.
            differing.add_((~((a - b).abs() <= 1e-3)).sum())

    graph = replayed(call)
    edges = read_edges(graph)
    graph.instantiate()
    differing.zero_()
    for _ in range(replays):
        graph.replay()
    wait_for(function.__name__)
    wrong = int(differing)
    unsafe = [
        *([f"{len(waitless)} attributed kernels never wait (R2)"] if waitless else []),
        *([f"{wrong} values differ"] if wrong else []),
    ]
    return {
        "probe": "P9",
        "code": f"Inductor, {function.__name__}",
        "kernels": len(sources),
        "attribute": sum(edge.programmatic for edge in edges),
        "of them without a wait": len(waitless),
        "differing": wrong,
        "verdict": "; ".join(unsafe) or "none differs",
    }


class Layer(torch.nn.Module):
    """norm, a block of experts, residual, norm: what stands around a chain in a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.block = examples()["grouped_mm"](dtype=torch.bfloat16, **BLOCK).module
        self.before, self.after = (torch.nn.RMSNorm(BLOCK["hidden"], dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.block(self.before(x)))


def around_a_block(tokens: int, replays: int) -> dict[str, Any]:
    """P9: a layer with Inductor's attribute on the kernels around our chain, and without."""
    torch.manual_seed(0)
    module = Layer().cuda()
    x = torch.randn(tokens, BLOCK["hidden"], dtype=torch.bfloat16, device="cuda")
    graphs: dict[str, Callable[[], object]] = {}
    results: dict[str, Tensor] = {}
    compiled: dict[str, Any] = {}
    with torch.no_grad():
        for way, pdl in (("on", True), ("off", False)):
            torch._dynamo.reset()
            options = {"require_match": True, "inductor": {"triton.enable_pdl": pdl}}
            compiled[way] = torch.compile(module, backend=backend_or_function("moepdl"), options=options, dynamic=False)
            out = results[way] = torch.empty_like(compiled[way](x))

            def call(_: Any, compiled: Any = compiled[way], out: Tensor = out) -> None:
                out.copy_(compiled(x))

            graphs[way] = captured(call, [None])
        samples = device_us(graphs, rounds=100)
        differing = torch.zeros((), dtype=torch.int32, device="cuda")
        for _ in range(replays):
            x.neg_()
            x.copy_(x.roll(1, 1))
            graphs["on"]()
            graphs["off"]()
            differing.add_((results["on"] != results["off"]).any())
        wait_for("a layer around a chain")
    on, off = (median(samples[way]) for way in ("on", "off"))
    return {
        "probe": "P9",
        "T": tokens,
        "off us": off,
        "on us": on,
        "gain us": round(off - on, 2),
        "on / off (95 %)": str(timing.ratio(samples["on"], samples["off"])),
        "replays": replays,
        "replays that differ": int(differing),
    }


def rows(replays: int) -> list[dict[str, Any]]:
    """The table of what happens to the attribute."""
    return [*user_kernels(), pattern(scatter, replays), pattern(reuse, replays)]


def gain_rows(replays: int) -> list[dict[str, Any]]:
    """The table of what Inductor's attribute gains around a chain."""
    return [around_a_block(tokens, replays) for tokens in (1, 8)]

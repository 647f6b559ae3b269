"""The main job: a Qwen3-MoE decoder from transformers' own classes, eager against Inductor against moepdl.

Three workloads (prefill, one token, one training step) are compiled by both compilers, checked against a float64 run
of the same module, and timed in turns. A table is printed and the reports are written. Run it as `moepdl demo` or
`make demo`.

How the check works. The float64 run takes the expert ids that eager chose, since with other experts the numbers are
not comparable; an output passes when its error is at most 1.5 times eager's own plus a small tolerance. In 16-bit
types the ids of a near tie may differ between any two correct runs: where eager itself differs from float64's own
choice, the number of such choices is printed and the float64 run keeps its own ids, so that eager's error too counts
what such a choice costs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_compiler import timing
from moe_compiler.progress import Progress

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moe_compiler.report import Report

# Sizes of one layer: the first is for a CPU, the second is Qwen3-30B-A3B's.
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
QWEN3_30B_A3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-3}
FACTOR = 1.5


@dataclass
class Workload:
    """One shape and what is done with it. `ids_BS` are the token ids; train means loss and backward."""

    name: str
    ids_BS: torch.Tensor
    train: bool = False


@dataclass
class Result:
    """What one workload gave: seconds and errors by way, near ties, reports."""

    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    near_ties: int = 0
    choices: int = 0
    reports: list[Report] = field(default_factory=list)

    def limit(self, dtype: str) -> float:
        """The largest error that passes."""
        return FACTOR * self.errors["eager"] + TOLERANCE[dtype]

    def passes(self, way: str, dtype: str) -> bool:
        # Written so that a NaN fails.
        return self.errors[way] <= self.limit(dtype)

    def to_dict(self, dtype: str) -> dict[str, Any]:
        """What `--json` prints of this workload."""
        return {
            "name": self.workload.name,
            "shape": list(self.workload.ids_BS.shape),
            "train": self.workload.train,
            "median_ms": {way: timing.milliseconds(samples) for way, samples in self.seconds.items()},
            "moepdl_over_inductor": asdict(timing.ratio(self.seconds["moepdl"], self.seconds["inductor"])),
            "errors": self.errors,
            "right": self.passes("moepdl", dtype),
            "near_ties": self.near_ties,
            "choices": self.choices,
        }


def backend_or_function(name: str) -> Any:
    """The name, or moepdl's function itself when the package runs from a clone that was not installed."""
    import torch

    if name == "moepdl" and name not in torch._dynamo.list_backends(exclude_tags=()):
        from moe_compiler.backend import moepdl

        return moepdl
    return name


def ignore_known_warnings() -> None:
    """Silence what Dynamo says about transformers' cached version checks: nothing that a reader of ours can act on."""
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")


def build_model(sizes: dict[str, int], layers: int, experts: str, device: str, dtype: torch.dtype) -> nn.Module:
    """A randomly initialised Qwen3MoeForCausalLM, seed 0. Raises ImportError when transformers is missing."""
    import torch
    from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(num_hidden_layers=layers, norm_topk_prob=True, use_cache=False, **sizes)
    config._experts_implementation = experts
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # the experts and the router are created empty or zero
                parameter.normal_(std=0.02)
    return model


def _routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]


@contextlib.contextmanager
def hooked_routers(model: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """hook(index of the layer, router, output) runs after each router; what it returns replaces the output."""

    def bind(index: int) -> Callable[..., Any]:
        return lambda module, inputs, output: hook(index, module, output)

    handles = [router.register_forward_hook(bind(i)) for i, router in enumerate(_routers(model))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def chosen_ids(model: nn.Module, run: Callable[[], object]) -> list[torch.Tensor]:
    """The expert ids [T, K] of each layer while `run` calls the model."""
    found: list[torch.Tensor] = []

    def keep(index: int, router: nn.Module, output: Any) -> None:
        found.append(output[2])

    with hooked_routers(model, keep):
        run()
    return found


@contextlib.contextmanager
def forced_ids(model: nn.Module, ids: list[torch.Tensor]) -> Iterator[list[int]]:
    """Routers of Qwen3-MoE choose `ids` ([T, K] each, in the order of the layers) and weigh them by their own scores.

    Yields a list that gets, for each router call, the number of tokens for which it would have chosen other experts.
    """
    import torch

    ties: list[int] = []

    def force(index: int, router: Any, output: Any) -> Any:
        logits, _, own = output
        chosen = ids[index].to(own.device)
        ties.append(int((own.sort(-1).values != chosen.sort(-1).values).any(-1).sum()))
        weights = torch.softmax(logits, -1).gather(-1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    with hooked_routers(model, force):
        yield ties


def float64_mode() -> Any:
    """A mode in which what the model's code casts to float32 (norms, softmax, rotary angles) is float64 instead."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Float64(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            swap = [torch.float64 if a is torch.float32 else a for a in args]
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
            return func(*swap, **kwargs)

    return Float64()


def _run(model: Any, workload: Workload) -> torch.Tensor:
    """Logits [B*S, V] of an inference workload, or the loss of a training one, after its backward."""
    import torch

    if workload.train:
        model.zero_grad()  # to None: gradients kept from an earlier run stay as they were
        loss: torch.Tensor = model(input_ids=workload.ids_BS, labels=workload.ids_BS, use_cache=False).loss
        loss.backward()
        return loss.detach()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=workload.ids_BS, use_cache=False).logits
        return logits.flatten(0, 1)


def _outputs(model: nn.Module, call: Any, workload: Workload) -> list[torch.Tensor]:
    """What is compared: the logits, or the loss and all gradients."""
    result = _run(call, workload)
    if not workload.train:
        return [result]
    return [result, *(p.grad for p in model.parameters() if p.grad is not None)]


def relative_error(outputs: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Relative error in the norm over all outputs together; each counts as its own float64 norm says."""
    if len(outputs) != len(exact):
        return float("inf")
    worst = off = size = 0.0
    for i, (out, want) in enumerate(zip(outputs, exact, strict=True)):
        difference = (out.to(want.device, want.dtype) - want).norm().item()
        if len(exact) > 1 and i == 0:  # the loss: a scalar among millions of gradients would not be seen
            worst = difference / want.norm().item()
            continue
        off += difference**2
        size += want.norm().item() ** 2
    return max(worst, (off / size) ** 0.5)


class Exact:
    """The float64 twin of a model, with eager's expert ids where every choice but near ties agrees."""

    def __init__(self, model: nn.Module) -> None:
        import torch

        need = sum(p.numel() for p in model.parameters()) * 8 * 2.5  # weights, gradients, room to work
        device = next(model.parameters()).device
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < need:
            device = torch.device("cpu")
        self.model = copy.deepcopy(model).to(device=device, dtype=torch.float64)
        # The loop over experts: no grouped kernel is needed in float64, and it is the plainest statement of the block.
        self.model.set_experts_implementation("eager")  # type: ignore[operator]

    def outputs(self, workload: Workload, eager_ids: list[torch.Tensor], result: Result) -> list[torch.Tensor]:
        """The outputs to compare with. Counts near ties into `result`."""
        device = next(self.model.parameters()).device
        moved = Workload(workload.name, workload.ids_BS.to(device), workload.train)
        self.model.train(workload.train)
        with float64_mode():
            with forced_ids(self.model, eager_ids) as ties:
                exact = _outputs(self.model, self.model, moved)
            result.near_ties, result.choices = sum(ties), sum(ids.shape[0] for ids in eager_ids)
            if result.near_ties:
                exact = _outputs(self.model, self.model, moved)
        return exact


def _new_reports(known: Sequence[Report]) -> list[Report]:
    from moe_compiler import last_reports

    return [report for report in last_reports() if not any(report is old for old in known)]


def run_workload(
    model: nn.Module, exact: Exact, workload: Workload, arguments: argparse.Namespace, progress: Progress
) -> Result:
    """Compile with both, check, time in turns."""
    import torch

    device = workload.ids_BS.device
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    result = Result(workload)
    model.train(workload.train)
    torch._dynamo.reset()

    progress.step(f"{workload.name}: eager and float64")
    ids = chosen_ids(model, lambda: _run(model, workload))
    want = exact.outputs(workload, ids, result)
    ways: dict[str, Any] = {"eager": model}
    result.errors["eager"] = relative_error(_outputs(model, model, workload), want)
    for way, name in (("inductor", "inductor"), ("moepdl", arguments.backend)):
        progress.step(f"{workload.name}: compiling with {name}")
        ours = name == "moepdl"
        known = _new_reports([]) if ours else []
        options: dict[str, Any] | None = {"dump": str(Path(arguments.out) / "dump" / workload.name)} if ours else None
        ways[way] = torch.compile(model, backend=backend_or_function(name), dynamic=False, options=options)
        result.errors[way] = relative_error(_outputs(model, ways[way], workload), want)
        if ours:
            result.reports = _new_reports(known)
    del want
    exact.model.zero_grad()

    progress.step(f"{workload.name}: timing")
    calls = {way: _caller(call, workload) for way, call in ways.items()}
    result.seconds = timing.interleaved(calls, budget_s=arguments.seconds, synchronize=synchronize)
    model.zero_grad()
    return result


def _caller(call: Any, workload: Workload) -> Callable[[], object]:
    return lambda: _run(call, workload)


HEADER = ("workload", "eager ms", "Inductor ms", "moepdl ms", "moepdl / Inductor (95 %)", "errors")


def table(results: list[Result]) -> str:
    """One row a workload. Errors are eager's, Inductor's and moepdl's."""
    rows: list[tuple[str, ...]] = [HEADER]
    for result in results:
        medians = {way: timing.milliseconds(samples) for way, samples in result.seconds.items()}
        rows.append(
            (
                f"{result.workload.name} {'x'.join(map(str, result.workload.ids_BS.shape))}",
                *(f"{medians[way]:.2f}" for way in ("eager", "inductor", "moepdl")),
                str(timing.ratio(result.seconds["moepdl"], result.seconds["inductor"])),
                " / ".join(f"{result.errors[way]:.1e}" for way in ("eager", "inductor", "moepdl")),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def workloads(device: str, vocabulary: int) -> list[Workload]:
    """Prefill, one token without a cache, and a training step. Token ids are drawn with seed 0."""
    import torch

    draw = torch.Generator().manual_seed(0)
    shapes = (("prefill", (1, 2048), False), ("decode", (1, 1), False), ("train", (2, 1024), True))
    if device == "cpu":
        shapes = (("prefill", (1, 256), False), ("decode", (1, 1), False), ("train", (2, 64), True))
    return [
        Workload(name, torch.randint(0, vocabulary, shape, generator=draw).to(device), train)
        for name, shape, train in shapes
    ]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="moepdl demo", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--layers", type=int, default=4, help="decoder layers (default 4)")
    p.add_argument(
        "--experts", default="grouped_mm", choices=["grouped_mm", "batched_mm"], help="transformers' spelling"
    )
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument("--dtype", choices=list(TOLERANCE), help="default: float32 on a CPU, bfloat16 on CUDA")
    p.add_argument("--backend", default="moepdl", help="what stands in the third column")
    p.add_argument("--seconds", type=float, default=3.0, help="time to measure for, a workload")
    p.add_argument("--json", action="store_true", help="print the results as JSON")
    p.add_argument("--out", default="out/demo", help="folder for reports and dumps (default out/demo)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0: all outputs are right. 1: an output is outside the error rule. 2: something needed is missing."""
    arguments = parser().parse_args(argv)
    import torch

    ignore_known_warnings()
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        print("moepdl demo: --device cuda, but torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    dtype = arguments.dtype or ("bfloat16" if device == "cuda" else "float32")
    sizes = QWEN3_30B_A3B if device == "cuda" else SMALL
    try:
        model = build_model(sizes, arguments.layers, arguments.experts, device, getattr(torch, dtype))
    except ImportError as error:
        print(
            f"moepdl demo: {error}\n"
            "  why: the demo compiles a model made of transformers' own classes\n"
            "  try: pip install 'transformers>=5.17', or `make demo`, which sets up an environment of its own",
            file=sys.stderr,
        )
        return 2
    environment = timing.environment(device)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    described = (
        f"Qwen3-MoE decoder: {arguments.layers} layers, {count:.0f} M parameters, hidden {sizes['hidden_size']}, "
        f"{sizes['num_experts']} experts of {sizes['moe_intermediate_size']}, {sizes['num_experts_per_tok']} a token, "
        f"{dtype}, written as {arguments.experts}"
    )
    if not arguments.json:
        print(", ".join(f"{name} {version}" for name, version in environment.items()))
        print(described, end="\n\n")
    with Progress("demo") as progress:
        progress.step("float64 twin")
        exact = Exact(model)
        jobs = workloads(device, sizes["vocab_size"])
        results = [run_workload(model, exact, job, arguments, progress) for job in jobs]
    saved = _save_reports(results, Path(arguments.out))
    right = all(result.passes("moepdl", dtype) for result in results)
    if arguments.json:
        rows = [result.to_dict(dtype) for result in results]
        paths = [str(path) for path in saved]
        print(
            json.dumps({"model": described, "environment": environment, "workloads": rows, "reports": paths}, indent=1)
        )
    else:
        _print_results(results, dtype, saved)
    return 0 if right else 1


def _save_reports(results: list[Result], out: Path) -> list[Path]:
    """One file a compiled graph, in folder out; the full paths."""
    saved = []
    for result in results:
        for i, report in enumerate(result.reports):
            suffix = f"-{i}" if len(result.reports) > 1 else ""
            saved.append(report.save(out / f"{result.workload.name}{suffix}.html").resolve())
    return saved


def _print_results(results: list[Result], dtype: str, saved: list[Path]) -> None:
    print(table(results))
    print("\nmedians of calls in turns; errors against float64, relative: eager / Inductor / moepdl")
    for result in results:
        name = result.workload.name
        if result.near_ties:
            ties = f"{result.near_ties} of {result.choices} choices"
            print(f"{name}: in {ties} eager's experts are not float64's (near ties)")
        if not result.passes("moepdl", dtype):
            print(f"{name}: WRONG: error {result.errors['moepdl']:.2e} is above {result.limit(dtype):.2e}")
    if all(result.passes("moepdl", dtype) for result in results):
        print(f"all outputs are right: error at most {FACTOR} x eager's + {TOLERANCE[dtype]:.0e}")
    faster = [statistics.median(r.seconds["moepdl"]) < statistics.median(r.seconds["inductor"]) for r in results]
    print(f"moepdl is faster than Inductor in {sum(faster)} of {len(faster)} workloads\n")
    first = True
    if any(result.reports for result in results):
        print(
            "what moepdl did, by workload; the number is Dynamo's: code/compilation, Inductor's compilations included"
        )
    for result in results:
        for report in result.reports:
            # One in full; the others have the same blocks.
            print(f"{result.workload.name}: {report if first else report.summary()}")
            first = False
    if saved:
        print("\nreports:", *saved, sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())

"""Reports built by hand, as the backend fills them: a decoder of 32 MoE layers with one near miss, and small ones."""

from __future__ import annotations

import dataclasses

from moe_compiler.report import (
    ChainRecord,
    DagRecord,
    EdgeRecord,
    GraphRecord,
    LaunchRecord,
    MatchRecord,
    MissRecord,
    PassRecord,
    Report,
    VariantRecord,
)

ROUTER_LINE = "modeling_qwen3_moe.py:231: routing_weights, selected = torch.topk(routing_weights, self.top_k, dim=-1)"
MISS_LINE = "proto.py:47: w, i = torch.topk(p, s.k)"
MISS_AT = 'proto.py:48: a = F.silu(torch.einsum("ti,taoi->tao", x, s.w1[i])) * up'


def launch(kernel: str, reads: str, writes: str, weights: str = "", us: float | None = None, **more) -> LaunchRecord:
    """A launch from space-separated names."""
    return LaunchRecord(
        kernel,
        tuple(reads.split()),
        tuple(writes.split()),
        tuple(weights.split()),
        waits=True,
        triggers=True,
        predicted_us=us,
        **more,
    )


def few() -> VariantRecord:
    """Two kernels without a sort, chained programmatically."""
    launches = (
        launch("gate_up_few", "x ids", "act", "gate", us=5.8),
        launch("down_few", "act ids weights", "y", "down", us=3.9, pdl=True),
    )
    edge = EdgeRecord(0, 1, "raw", True, "adjacent, the producer triggers and the consumer waits", 1.6, ("act",))
    return VariantRecord("few", 4, launches, (edge,))


def many() -> VariantRecord:
    """A shared expert on a second stream beside the chain."""
    launches = (
        launch("order", "ids", "perm starts", us=4.2),
        launch("gate_up", "x perm starts", "act", "gate", us=61.0, pdl=True),
        launch("shared_expert", "x", "shared", "shared_gate shared_down", us=38.0, stream=1),
        launch("down", "act perm starts", "pairs", "down", us=33.5, pdl=True),
        launch("combine", "pairs weights shared", "y", us=7.4),
    )
    edges = (
        EdgeRecord(0, 1, "raw", True, "adjacent", 2.9, ("perm", "starts")),
        EdgeRecord(1, 3, "raw", True, "adjacent", 4.5, ("act",)),
        EdgeRecord(0, 3, "raw", False, "complete before the parent's wait returned", None, ("perm", "starts")),
        EdgeRecord(3, 4, "raw", False, "predicted gain 0.2 us is below 0.5 us", None, ("pairs",)),
        EdgeRecord(2, 4, "raw", False, "another stream: joined by an event", None, ("shared",)),
    )
    return VariantRecord("many", None, launches, edges)


def backward() -> VariantRecord:
    launches = (
        launch("grad_act", "grad_y weights preact perm starts", "grad_preact act grad_weights", "down", us=74.0),
        launch("grad_down", "grad_y act perm starts", "grad_w_down", us=66.0, pdl=True),
        launch("grad_gate_up", "x grad_preact perm starts", "grad_w_gate", us=121.0, pdl=True),
        launch("grad_pairs", "grad_preact perm starts", "grad_rows", "gate", us=58.0, pdl=True),
        launch("combine", "grad_rows", "grad_x", us=8.0, pdl=True),
    )
    edges = (
        EdgeRecord(0, 1, "raw", True, "adjacent", 3.8, ("act",)),
        EdgeRecord(0, 2, "raw", False, "complete before the parent's wait returned", None, ("grad_preact",)),
        EdgeRecord(1, 2, "order", True, "adjacent in the stream", 2.2),
        EdgeRecord(2, 3, "order", True, "adjacent in the stream", 2.2),
        EdgeRecord(3, 4, "raw", True, "adjacent", 2.5, ("grad_rows",)),
    )
    return VariantRecord("many", None, launches, edges)


def match(index: int) -> MatchRecord:
    return MatchRecord(
        f"model.layers.{index}.mlp",
        "hf_grouped_mm",
        "R1/R2 softmax, top-k, renormalise",
        where=ROUTER_LINE,
        sizes={"E": "128", "k": "8", "T": "s77", "H": "2048", "I": "768"},
        attributes={"score": "softmax", "order": "before", "activation": "silu", "gated": True, "weight_at": "output"},
    )


def dag(direction: str = "forward") -> DagRecord:
    """Routing, an exchange over ranks, experts beside a shared expert, and the way back."""

    def node(identity: str, kind: str, size: int | str = 0, flops: int | str = 0) -> dict:
        return {"id": identity, "label": identity, "kind": kind, "bytes": size, "flops": flops, "group": "layers.0.mlp"}

    nodes = [
        node("x", "input", "4096*s77"),
        node("route", "compute", 4.1e5, 3.2e6),
        node("order", "compute", 65536),
        node("dispatch_start", "exchange", 33.5e6),
        node("shared_expert", "compute", 9.4e6, 19.3e9),
        node("dispatch_wait", "exchange"),
        node("gate_up", "compute", 805e6, 51.5e9),
        node("down", "compute", 402e6, 25.8e9),
        node("combine", "compute", 67e6, 33e6),
        node("y", "output", "4096*s77"),
    ]
    pairs = [
        ("x", "route", "raw", False),
        ("route", "order", "raw", True),
        ("x", "dispatch_start", "raw", False),
        ("order", "dispatch_start", "raw", False),
        ("x", "shared_expert", "raw", False),
        ("dispatch_start", "dispatch_wait", "order", False),
        ("dispatch_wait", "gate_up", "raw", False),
        ("gate_up", "down", "raw", True),
        ("down", "combine", "raw", True),
        ("order", "combine", "raw", False),
        ("shared_expert", "combine", "raw", False),
        ("combine", "y", "raw", False),
    ]
    edges = [{"source": a, "target": b, "kind": kind, "programmatic": pdl} for a, b, kind, pdl in pairs]
    return DagRecord(direction, nodes, edges)


def sample() -> Report:
    """32 equal layers, a candidate that missed, forward and backward chains; nothing pending."""
    layers = range(32)
    miss = MissRecord(
        "topk",
        MISS_LINE,
        "gather_einsum",
        2,
        3,
        "combine",
        "expert outputs are not reduced with the routing weights",
        node="mul_3",
        hint="multiply by the top-k weights and sum over k",
        at=MISS_AT,
    )
    return Report(
        frame="0/0",
        status="rewritten",
        options={
            "pdl": "auto",
            "overlap": "auto",
            "chunks": "auto",
            "disable": [],
            "verify": "structural",
            "mode": None,
            "dump": "/tmp/dump",
        },
        origins={"pdl": "environment", "verify": "argument", "dump": "argument"},
        environment={
            "moepdl": "0.1.0",
            "torch": "2.13.0",
            "triton": "3.9.0",
            "device": "NVIDIA H200",
            "capability": "9.0",
        },
        matches=[match(index) for index in layers],
        misses=[miss],
        passes=[
            PassRecord("canonicalize", "capture", "captured", "exact", 64, 0.012, {"aten.t": -64, "aten.linear": 32}),
            PassRecord("find_moe", "capture", "captured", "exact", 0, 0.044),
            PassRecord(
                "raise_moe",
                "capture",
                "moe",
                "rounding",
                32,
                0.031,
                {"moepdl.route": 32, "moepdl.experts": 32, "aten._grouped_mm": -64, "aten.topk": -32},
            ),
            PassRecord(
                "expand_stages", "forward", "stages", "exact", 32, 0.021, {"moepdl.experts": -32, "moepdl.gate_up": 32}
            ),
            PassRecord("chain_pdl", "forward", "launches", "exact", 32, 0.009),
            PassRecord("lower", "backward", "launches", "exact", 32, 0.017, {"moepdl.chain": 32}),
        ],
        schedule=[ChainRecord(f"layers.{index}.mlp", "forward", (few(), many())) for index in layers]
        + [ChainRecord(f"layers.{index}.mlp", "backward", (backward(),)) for index in layers],
        dags=[dag("forward")],
        graphs=[
            GraphRecord(0, "captured", "capture", '"""captured"""\nx = 1\ny = x < 2\nz = y\n'),
            GraphRecord(3, "raise_moe", "capture", '"""raised"""\nx = 1\ny = experts(x)\nz = y\n'),
            GraphRecord(4, "expand_stages", "forward", "x = 1\n"),
            GraphRecord(6, "lower", "forward", "x = 2\n"),
        ],
        notes=["overlap off: no all-to-all in this graph"],
    )


def all_well() -> Report:
    """The sample without its miss."""
    return dataclasses.replace(sample(), misses=[], notes=[])


def nothing() -> Report:
    """A graph without any candidate."""
    return Report("1/0", "unchanged")


def hostile() -> Report:
    """Every text field tries to break out of its format."""
    evil = '<script>alert("x")</script>\n]]> & \\ "quoted" </style></pre>'
    report = sample()
    report.matches = [dataclasses.replace(match(0), block=evil, where=f"a.py:1: {evil}", attributes={evil: evil})]
    report.misses = [MissRecord(evil, evil, evil, 1, 2, evil, evil, evil, evil, evil)]
    report.notes, report.errors = [evil], [evil]
    report.environment = {evil: evil}
    report.graphs = [GraphRecord(0, "captured", "capture", evil)]
    report.dags = [
        DagRecord(
            evil,
            [{"id": evil, "label": evil, "kind": evil, "bytes": evil, "flops": None}, {"id": "b", "label": "b"}],
            [{"source": evil, "target": "b", "kind": evil}],
        )
    ]
    report.schedule = [
        ChainRecord(evil, "forward", (VariantRecord(evil, None, (launch(evil.replace(" ", "_"), "a", "b"),)),))
    ]
    return report

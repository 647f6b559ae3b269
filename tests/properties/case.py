"""A case: one way of writing an MoE block, as a record of choices, and how cases are drawn, named and shrunk.

    case = draw(17)                      # the same on every machine
    str(case)                            # only what differs from the plainest block: "formulation=grouped k=3 ..."
    parse(str(case)) == case
    shrink(case, still_fails)            # towards the plainest block

A choice that means nothing in a case (how rows are sorted in a block that sorts none) always has its plainest value,
so that equal modules have equal names. The first value of a dimension is its plainest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

FIDDLES = ("none", "to", "view", "flatten", "unsqueeze", "contiguous", "clone", "slice", "widen")
LOOPS = ("one_hot", "where")
SORTED = ("grouped", "split")


@dataclass(frozen=True)
class Case:
    """The choices, in the order in which they are drawn. `DIMENSIONS` has the values of each."""

    formulation: str = "batched"
    # the run
    dtype: str = "float32"
    mode: str = "inference"
    shapes: str = "static"
    remainder: str = "eager"
    tokens: int = 7
    experts: int = 4
    k: int = 2
    hidden: int = 16
    inter: int = 8
    rank: int = 2
    layers: int = 1
    trained: str = "all"
    # the router
    choose: str = "topk"
    score: str = "softmax"
    order: str = "before"
    score_dtype: str = "own"
    groups: str = "none"
    fill: str = "-inf"
    correction: str = "none"
    renorm: str = "none"
    scale: float = 1.0
    expert_scale: bool = False
    router_bias: bool = False
    weight_dtype: str = "x"
    ids_dtype: str = "int64"
    # the experts
    layout: str = "packed"
    weights: str = "stored"
    activation: str = "silu"
    act_spelling: str = "function"
    gated: bool = True
    gate_order: str = "gate_up"
    split: str = "chunk"
    factors: str = "gate_up"
    bias: bool = False
    weight_at: str = "output"
    # the way there and back
    pick: str = "index"
    repeat: str = "interleave"
    product: str = "bmm"
    sort: str = "sort"
    token: str = "floor_divide"
    counts: str = "bincount"
    matmul: str = "private"
    inverse: str = "argsort"
    mask: str = "ekt"
    where: str = "where"
    dense_rows: str = "repeat"
    dense_scores: str = "scatter"
    combine: str = "sum"
    zeros: str = "zeros_like"
    # no-ops on the way
    fiddle_x: str = "none"
    fiddle_ids: str = "none"
    fiddle_weights: str = "none"
    fiddle_rows: str = "none"
    fiddle_act: str = "none"
    fiddle_out: str = "none"
    # around the block
    norm: bool = False
    shared: str = "none"
    add: str = "plus"
    extra: str = "none"
    residual: bool = False
    checkpoint: bool = False

    def __str__(self) -> str:
        plain = Case()
        parts = [
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return " ".join(parts) or "plain"


NAMES = tuple(f.name for f in fields(Case))
Weighted = dict[Any, float]

# Every dimension with all of its values and how often each is drawn; `_allowed` narrows them for a case half drawn.
DIMENSIONS: dict[str, Weighted] = {
    "formulation": {"batched": 4, "grouped": 5, "einsum": 3, "dense": 3, "one_hot": 3, "where": 3, "split": 1},
    "dtype": {"float32": 5, "bfloat16": 4, "autocast": 1},
    "mode": {"inference": 1, "training": 1},
    "shapes": {"static": 2, "dynamic": 1},
    "remainder": {"eager": 39, "inductor": 1},
    "tokens": {7: 3, 0: 1, 1: 1, 2: 1, 37: 3, 64: 1},
    "experts": {4: 3, 2: 1, 3: 1, 8: 3, 10: 1, 16: 1},
    "k": {2: 4, 1: 2, 3: 2, 4: 1},
    "hidden": {16: 3, 8: 1, 24: 1, 48: 1},
    "inter": {8: 3, 16: 1, 12: 1, 20: 1},
    "rank": {2: 2, 3: 1},
    "layers": {1: 15, 2: 1},
    "trained": {"all": 6, "no_experts": 1, "no_router": 1, "no_x": 1},
    "choose": {"topk": 8, "gather": 3, "unsorted": 2, "argmax": 1, "argsort": 0.5, "table": 0.5},
    "score": {"softmax": 6, "sigmoid": 3, "none": 0.5, "sqrtsoftplus": 0.5},
    "order": {"before": 3, "after": 1},
    "score_dtype": {"own": 2, "cast": 2, "argument": 1},
    "groups": {"none": 5, "top2": 1, "max": 1},
    "fill": {"-inf": 1, "0": 1},
    "correction": {"none": 4, "small": 1, "negative": 1},
    "renorm": {"none": 2, "sum": 3, "in_place": 1, "eps": 1, "clamp": 0.5, "l2": 0.3},
    "scale": {1.0: 3, 2.5: 1},
    "expert_scale": {False: 12, True: 1},
    "router_bias": {False: 8, True: 1},
    "weight_dtype": {"x": 3, "kept": 1},
    "ids_dtype": {"int64": 6, "int32": 1},
    "layout": {
        "packed": 4, "transposed": 2, "separate": 3, "separate_transposed": 2, "flat": 0.7, "modules": 4,
        "modules_packed": 1, "strided": 0.7,
    },
    "weights": {"stored": 12, "cast": 1, "lora": 1},
    "activation": {"silu": 5, "gelu": 2, "gelu_tanh": 1, "relu": 1, "relu2": 1, "swiglu_clamp": 1},
    "act_spelling": {"function": 3, "written_out": 1},
    "gated": {True: 4, False: 1},
    "gate_order": {"gate_up": 6, "up_gate": 1, "interleaved": 1},
    "split": {"chunk": 3, "split": 1, "slice": 1, "tensor_split": 0.5},
    "factors": {"gate_up": 2, "up_gate": 1},
    "bias": {False: 7, True: 1},
    "weight_at": {"output": 8, "input": 1, "middle": 1},
    "pick": {"index": 3, "index_select": 1, "gather": 0.5},
    "repeat": {"interleave": 2, "expand": 1, "counting": 1, "repeated_index": 1},
    "product": {"bmm": 2, "matmul": 1, "einsum": 1, "row": 1},
    "sort": {"sort": 2, "argsort": 2, "method": 1},
    "token": {"floor_divide": 2, "div": 1, "trunc": 0.5, "repeated": 1},
    "counts": {"bincount": 2, "histc": 2, "one_hot": 1, "scatter_add": 0.7, "compare": 0.7},
    "matmul": {"private": 2, "functional": 2, "fallback": 2},
    "inverse": {"argsort": 2, "written": 2, "scatter": 1},
    "mask": {"ekt": 2, "etk": 1, "tke": 1},
    "where": {"where": 2, "nonzero_tuple": 1, "nonzero": 1},
    "dense_rows": {"repeat": 1, "expand": 1, "einsum": 1, "matmul": 1},
    "dense_scores": {"scatter": 2, "one_hot": 1, "kept": 1},
    "combine": {
        "sum": 3, "einsum": 1, "bmm": 1, "index_add": 2, "scatter_add": 1, "index_put": 1, "home_sum": 1, "plus_at": 1,
    },
    "zeros": {"zeros_like": 2, "zeros": 1, "new_zeros": 1},
    **{f"fiddle_{at}": {kind: 12 if kind == "none" else 0.5 for kind in FIDDLES if (at, kind) != ("ids", "widen")}
       for at in ("x", "ids", "weights", "rows", "act", "out")},
    "norm": {False: 4, True: 1},
    "shared": {"none": 4, "plain": 1, "gated": 1},
    "add": {"plus": 2, "swapped": 1, "in_place": 1},
    "extra": {"none": 6, "logits": 1, "aux": 1, "weights": 1, "counted": 1},
    "residual": {False: 3, True: 1},
    "checkpoint": {False: 12, True: 1},
}  # fmt: skip


def _allowed(name: str, c: Case) -> list[Any]:
    """The values that dimension `name` may have, given the choices before it; the first alone when it means nothing."""
    values = list(DIMENSIONS[name])
    rule = _RULES.get(name)
    if rule is not None:
        values = [value for value in values if rule(value, c)]
    return values


def _training(c: Case) -> bool:
    return c.mode == "training"


def _packed(c: Case) -> bool:
    """Gate and up in one matrix?"""
    return c.layout in ("packed", "transposed", "modules_packed", "strided")


def _private(c: Case) -> bool:
    """Can torch's own grouped matmul compute this on a CPU: bf16, in rows of whole 16 bytes?"""
    return c.dtype == "bfloat16" and c.hidden % 8 == 0 and c.inter % 8 == 0


_SORTS = ("topk", "gather", "unsorted", "argmax")
_COMBINES = {
    "batched": ("sum", "einsum", "bmm", "index_add", "scatter_add"),
    "einsum": ("sum", "einsum", "bmm"),
    "dense": ("sum", "einsum"),
    "grouped": ("sum", "index_add", "scatter_add", "index_put", "home_sum", "einsum"),
    "split": ("sum", "index_add", "scatter_add", "index_put", "home_sum"),
    "one_hot": ("index_add", "index_put", "plus_at", "scatter_add"),
    "where": ("index_add", "index_put", "plus_at", "scatter_add"),
}


def _few(value: Any, usual: Any, applies: bool) -> bool:
    """Everything where the dimension applies, else only the usual value."""
    return applies or value == usual


# True where a value is possible. The choices that come later in `Case` are not drawn yet.
_RULES: dict[str, Callable[[Any, Case], bool]] = {
    # An unrolled loop is compiled expert by expert.
    "experts": lambda v, c: v <= 8 or c.formulation not in (*LOOPS, "split"),
    "k": lambda v, c: v <= c.experts,
    "layers": lambda v, c: v == 1 or c.dtype == "float32",
    "trained": lambda v, c: _few(v, "all", _training(c)),
    "choose": lambda v, c: {"argmax": c.k == 1}.get(v, True),
    "score": lambda v, c: v != "none" or c.choose != "argmax",
    # A table chooses by position: there is nothing to score after it that was not scored before.
    "order": lambda v, c: v == "before" or (c.score in ("softmax", "sigmoid") and c.choose in _SORTS[:3]),
    "score_dtype": lambda v, c: _few(v, "own", c.score != "none") and (v != "argument" or c.score == "softmax"),
    "groups": lambda v, c: _few(
        v, "none", c.order == "before" and c.choose in ("gather", "unsorted") and c.experts in (4, 8, 16)
        and c.k <= c.experts // 2 and c.score != "none"
    ),
    "fill": lambda v, c: _few(v, "-inf", c.groups != "none"),
    "correction": lambda v, c: _few(
        v, "none", c.order == "before" and c.choose in ("gather", "unsorted", "argsort") and c.score != "none"
    ),
    # One weight divided by itself has a gradient of nothing but roundings.
    "renorm": lambda v, c: _few(
        v, "none", c.score != "none" and c.order == "before" and (c.k > 1 or not _training(c))
    ),
    "scale": lambda v, c: _few(v, 1.0, c.score != "none"),
    "ids_dtype": lambda v, c: _few(v, "int64", c.formulation in ("grouped", "batched", "where")),
    "layout": lambda v, c: v not in ("modules", "modules_packed") or c.formulation in (*LOOPS, "split"),
    "weights": lambda v, c: v != "cast" or c.dtype == "bfloat16",
    "act_spelling": lambda v, c: _few(v, "function", c.activation in ("silu", "relu2")),
    "gated": lambda v, c: v or (c.activation != "swiglu_clamp" and not _packed(c)),
    "gate_order": lambda v, c: _few(v, "gate_up", c.gated and _packed(c)),
    "split": lambda v, c: _few(v, "chunk", c.gated and _packed(c) and c.gate_order != "interleaved"),
    "factors": lambda v, c: _few(v, "gate_up", c.gated),
    # Autocast rounds tokens that were weighted in fp32: refused by design, unless each has one expert.
    "weight_at": lambda v, c: v == "output"
    or (v == "input" and c.dtype != "autocast" and c.formulation in ("dense", *SORTED, *LOOPS))
    or (v == "middle" and not c.bias),
    "pick": lambda v, c: _few(v, "index", c.formulation != "dense" and c.formulation != "einsum"),
    "repeat": lambda v, c: _few(v, "interleave", c.formulation == "batched"),
    "product": lambda v, c: (
        _few(v, "bmm", c.formulation in ("batched", "einsum")) and (v != "row" or c.formulation == "batched")
    ),
    "sort": lambda v, c: _few(v, "sort", c.formulation in SORTED),
    "token": lambda v, c: _few(v, "floor_divide", c.formulation in SORTED),
    # Dynamo gives bincount an unknown length, and then no offsets to transformers' operator.
    "counts": lambda v, c: _few(v, "bincount", c.formulation in SORTED) and (
        v != "bincount" or c.formulation != "grouped" or _private(c)
    ),
    "matmul": lambda v, c: (
        v == "private" if c.formulation != "grouped"
        else _private(c) if v != "fallback" else c.counts != "bincount"
    ),
    "inverse": lambda v, c: _few(v, "argsort", c.formulation in SORTED),
    "mask": lambda v, c: _few(v, "ekt", c.formulation == "one_hot"),
    "where": lambda v, c: _few(v, "where", c.formulation in LOOPS),
    "dense_rows": lambda v, c: _few(v, "repeat", c.formulation == "dense"),
    "dense_scores": lambda v, c: _few(v, "scatter", c.formulation == "dense") and (
        v != "kept" or (c.order == "after" and c.scale == 1.0 and not c.expert_scale and c.choose == "topk")
    ),
    "combine": lambda v, c: v in _COMBINES[c.formulation]
    # A token must choose an expert once where its rows are written without accumulation.
    and (v != "plus_at" or c.choose in _SORTS)
    and (c.weight_at == "output" or v not in ("einsum", "bmm", "home_sum")),
    "zeros": lambda v, c: _few(v, "zeros_like", c.combine in ("index_add", "scatter_add", "index_put", "plus_at")),
    "extra": lambda v, c: v != "aux" or c.tokens > 0,  # the mean of no tokens is no number
    "add": lambda v, c: _few(v, "plus", c.shared != "none"),
    "checkpoint": lambda v, c: _few(v, False, _training(c) and c.extra != "counted"),
}  # fmt: skip


def _possible(c: Case) -> bool:
    """What no rule on a single dimension can say."""
    dense_input = c.formulation == "dense" and c.bias and c.weight_at != "output"
    scored_kept = c.dense_scores == "kept" and c.expert_scale
    modules = c.layout in ("modules", "modules_packed")
    return not dense_input and not scored_kept and not (modules and c.weights == "lora")


# What the suite draws: nothing that takes many seconds to compile.
QUICK = {"remainder": ("eager",), "experts": (2, 3), "shapes": ("static",)}


def draw(seed: int, quick: bool = False) -> Case:
    """The case of a seed. quick: without Inductor, and with small static loops."""
    source = random.Random(seed)
    while True:
        case = Case()
        for name in NAMES:
            values = _allowed(name, case)
            if quick and name in QUICK and (name == "remainder" or case.formulation in (*LOOPS, "split")):
                values = [value for value in values if value in QUICK[name]]
            weights = [DIMENSIONS[name][value] for value in values]
            case = replace(case, **{name: source.choices(values, weights)[0]})
        case = normal(case)
        if _possible(case):
            return case


def normal(case: Case) -> Case:
    """The case with every choice that its others do not allow put to its plainest allowed value."""
    for name in NAMES:
        values = _allowed(name, case)
        if getattr(case, name) not in values:
            case = replace(case, **{name: values[0]})
    return case


def parse(text: str) -> Case:
    """The case that `str(case)` names. Raises ValueError for a dimension or a value that does not exist."""
    values: dict[str, Any] = {}
    for part in text.split():
        if part == "plain":
            continue
        name, _, value = part.partition("=")
        if name not in DIMENSIONS:
            raise ValueError(f"{name!r} is no dimension of a case; there are {', '.join(DIMENSIONS)}")
        known = {str(item): item for item in DIMENSIONS[name]}
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
        values[name] = known[value]
    return normal(replace(Case(), **values))


def simpler(case: Case) -> Iterator[Case]:
    """Cases that differ from `case` by one choice that is plainer, the most telling first."""
    for name in NAMES:
        values = _allowed(name, case)
        for value in values[: values.index(getattr(case, name))]:
            candidate = normal(replace(case, **{name: value}))
            if candidate != case and _possible(candidate):
                yield candidate


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The plainest case found that still fails; `fails` is called at most a few hundred times."""
    seen = {case}
    again = True
    while again:
        again = False
        for candidate in simpler(case):
            if candidate in seen:
                continue
            seen.add(candidate)
            if len(str(candidate).split()) <= len(str(case).split()) and fails(candidate):
                case, again = candidate, True
                break
    return case

"""Every device kernel against its plain-torch reference in float64, for all layouts, data types and routings.

Each kernel is launched twice, with PDL off and on, into buffers full of NaN: both must agree bit by bit, and with the
reference within the rounding of the data type. Its inputs are the reference's results of the stage before it, so an
error is seen in the kernel that makes it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.route.reference import _limited
from moe_compiler.runtime_kernels.weights import WeightLayoutError, are_in_turns
from tests.gpu.cases import GPT_OSS, Case, biases_of, routing, weights_of

pytestmark = pytest.mark.gpu

# Relative to the norm: a rounding of the result, and for float32 the order of summation.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5, torch.float64: 0.0}
CASES = [
    Case(8, 2, 256, 128),
    Case(128, 8, 128, 192, layout="transposed", activation="gelu", routing="skewed", tokens=(1, 17, 1000)),
    Case(5, 3, 200, 72, layout="separate", activation="gelu_tanh", routing="outside"),
    Case(16, 4, 128, 64, layout="list", dtype=torch.float16, activation="relu", routing="skewed"),
    Case(40, 10, 64, 96, layout="list_packed", activation="silu", routing="outside", tokens=(1, 3, 128)),
    Case(4, 1, 136, 104, layout="separate", dtype=torch.float32, gated=False, activation="relu2"),
    Case(3, 2, 50, 35, layout="interleaved", dtype=torch.float32, weight_at="input", tokens=(1, 17, 128)),
    Case(16, 2, 256, 128, layout="packed", weight_at="input", routing="skewed", tokens=(1, 17, 1000)),
    Case(6, 2, 90, 46, layout="packed", gated=False, activation="gelu", routing="one", tokens=(1, 17, 128)),
    Case(300, 16, 64, 32, layout="packed", dtype=torch.float16, tokens=(2, 128)),
    Case(8, 2, 256, 128, activation=GPT_OSS, biased=True),
    Case(32, 4, 288, 288, layout="turned_columns", activation=GPT_OSS, biased=True, routing="skewed"),
    Case(32, 4, 288, 288, layout="up_first", activation=GPT_OSS, biased=True, tokens=(1, 17, 1000)),
    Case(
        3, 2, 50, 35, layout="turned_columns", dtype=torch.float32, weight_at="input", biased=True, tokens=(1, 17, 128)
    ),
    Case(4, 2, 256, 192, layout="turned_columns", tokens=(1000,), routing="outside", biased=True),
    Case(16, 4, 256, 192, layout="turns", activation=GPT_OSS, biased=True, tokens=(1, 17, 128, 1000)),
    Case(5, 3, 200, 72, layout="separate", activation="silu(limit=0.5)", biased=True, routing="outside"),
    Case(16, 4, 128, 64, layout="list", activation=GPT_OSS, biased=True, dtype=torch.float16, routing="skewed"),
    Case(40, 10, 64, 96, layout="list_packed", biased=True, routing="outside", tokens=(1, 3, 128)),
    Case(4, 1, 136, 104, layout="separate", dtype=torch.float32, gated=False, activation="relu2", biased=True),
    Case(3, 2, 50, 35, layout="interleaved", dtype=torch.float32, weight_at="input", biased=True, tokens=(1, 17, 128)),
    Case(6, 2, 90, 46, gated=False, activation="gelu(limit=0.5)", biased=True, routing="one", tokens=(1, 17, 128)),
    Case(60, 4, 704, 96, activation="silu(alpha=1.702)", biased=True, tokens=(1, 33, 1000)),
    Case(160, 6, 96, 704, layout="transposed", routing="skewed", tokens=(2, 1000)),
    # Rows enough for the kernels with specialised warps.
    Case(4, 2, 256, 192, tokens=(1000,), routing="skewed"),
    Case(3, 2, 320, 128, layout="separate", routing="outside", weight_at="input", tokens=(1000,), biased=True),
    # Experts with as many rows as a tile has, one less, one more, and none.
    Case(13, 2, 128, 64, routing="ragged", tokens=(15, 16, 127, 128, 129, 4097)),
    Case(13, 3, 136, 72, layout="list", routing="ragged", biased=True, tokens=(15, 16, 17, 127, 129, 300)),
    Case(13, 2, 64, 40, layout="separate", dtype=torch.float32, routing="ragged", tokens=(15, 16, 129, 400)),
    Case(4, 2, 2880, 2880, layout="turned_columns", activation=GPT_OSS, biased=True, tokens=(1, 3, 40)),
]


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [_map(v, change) for v in value]
    return value


def _wide(value: Any) -> Any:
    return _map(value, lambda t: (t.double() if t.is_floating_point() else t).cpu())


def _poisoned(like: Tensor) -> Tensor:
    fresh = torch.empty_like(like)
    return fresh.fill_(float("nan") if like.is_floating_point() else -(2**20))


class Runner:
    """Runs one kernel both ways and compares it with its reference; remembers where it is for the messages."""

    def __init__(self, where: str, dtype: torch.dtype) -> None:
        self.where, self.dtype = where, dtype

    def __call__(
        self,
        name: str,
        like: dict[str, Any],
        ins: dict[str, Any],
        attrs: dict[str, Any],
        rows: dict[str, Tensor] | None = None,
    ) -> dict[str, Any]:
        """Results like `like` of kernel `name`. `rows`: the rows of a result that must be right; the others may be
        anything.

        Returns the results of the reference, rounded to the types of `like`, on the GPU.
        """
        entry = kernel(name)
        got = []
        for pdl in (False, True):
            outs = {key: _map(value, _poisoned) for key, value in like.items()}
            entry.launch(outs, ins, attrs, pdl=pdl)
            torch.cuda.synchronize()
            got.append(outs)
        want = entry.reference(**{key: _wide(value) for key, value in ins.items()}, **self._wide_attrs(attrs))
        wants = dict(zip(entry.traits.writes, want if isinstance(want, tuple) else (want,), strict=True))
        for key in like:
            plain, chained, right = got[0][key], got[1][key], wants[key]
            if isinstance(plain, Tensor):
                plain, chained, right = [plain], [chained], [right]
            assert len(plain) == len(right)
            for p, c, r in zip(plain, chained, right, strict=True):
                self._compare(f"{self.where} {name}.{key}", p, c, r, (rows or {}).get(key))
        return {
            key: _map(wants[key], lambda t: t.cuda())
            if not isinstance(like[key], Tensor)
            else wants[key].to(device="cuda", dtype=like[key].dtype)
            for key in like
        }

    @staticmethod
    def _wide_attrs(attrs: dict[str, Any]) -> dict[str, Any]:
        return {key: torch.float64 if key == "dtype" else value for key, value in attrs.items()}

    def _compare(self, what: str, plain: Tensor, chained: Tensor, right: Tensor, rows: Tensor | None) -> None:
        assert plain.shape == right.shape, f"{what}: {tuple(plain.shape)} and {tuple(right.shape)}"
        if rows is not None:
            plain, chained, right = plain[rows], chained[rows], right[rows.cpu()]
        assert torch.equal(plain, chained), f"{what}: PDL changes the result"
        if not plain.is_floating_point():
            assert torch.equal(plain.cpu().long(), right.long()), f"{what}: not the reference's"
            return
        assert plain.isfinite().all(), f"{what}: {int((~plain.isfinite()).sum())} values were not written"
        error = (plain.double().cpu() - right.double()).norm()
        limit = TOLERANCE[self.dtype] * right.double().norm()
        assert error <= limit + 1e-5, f"{what}: error {error:.3g} of {right.double().norm():.3g}"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_expert_kernels(case: Case) -> None:
    torch.manual_seed(0)
    gate, up, down = weights_of(case)
    for tokens in case.tokens:
        _check_block(case, tokens, gate, up, down)


def _check_block(case: Case, tokens: int, gate: list[Tensor], up: list[Tensor], down: list[Tensor]) -> None:
    run = Runner(f"T={tokens}", case.dtype)
    device = {"device": "cuda"}
    pairs, k, parts = tokens * case.k, case.k, 2 if case.gated else 1
    ids = routing(case, tokens).to(device="cuda", dtype=torch.int64 if tokens % 2 else torch.int32)
    x, grad_y = (torch.randn(tokens, case.hidden).to(dtype=case.dtype, **device) for _ in range(2))
    weights = torch.rand(tokens, k).add(0.1).to(dtype=case.dtype, **device)
    inside, outside = (weights, None) if case.weight_at == "input" else (None, weights)
    row = torch.empty(pairs, case.hidden, dtype=case.dtype, **device)
    act = torch.empty(pairs, case.inner, dtype=case.dtype, **device)
    preact = torch.empty(pairs, parts * case.inner, dtype=case.dtype, **device)
    numbers = {"num_experts": case.experts}
    form = {"activation": case.activation, "gated": case.gated}
    ordering = {
        "perm": torch.empty(pairs, dtype=torch.int32, **device),
        "starts": torch.empty(case.experts + 1, dtype=torch.int32, **device),
    }
    expert = run("order", ordering, {"ids": ids}, numbers)
    used = torch.arange(pairs, **device) < expert["starts"][-1]
    biases = biases_of(case, gate, up, down)
    ups = {"gate": gate, "up": up}
    first = {**ups, "gate_bias": biases["gate_bias"], "up_bias": biases["up_bias"]}
    second = {"down": down, "down_bias": biases["down_bias"]}
    saved = run(
        "gate_up",
        {"act": act, "preact": preact},
        {"x": x, "weights": inside, **expert, **first},
        {"k": k, **form, "save": True},
        {"act": used, "preact": used},
    )
    run(
        "gate_up",
        {"act": act},
        {"x": x, "weights": inside, **expert, **first},
        {"k": k, **form, "save": False},
        {"act": used},
    )
    scattered = run("down", {"pairs": row}, {"act": saved["act"], **expert, **second}, {})
    for dtype in (case.dtype, torch.float32):
        like = {"y": torch.empty(tokens, case.hidden, dtype=dtype, **device)}
        run("combine", like, {**scattered, "weights": outside}, {"k": k, "dtype": dtype})
    few = run("gate_up_few", {"act": act}, {"x": x, "weights": inside, "ids": ids, **first}, form)
    run("down_few", {"y": x}, {**few, "ids": ids, "weights": outside, **second}, {"dtype": case.dtype})
    grads = run(
        "grad_act",
        {"grad_preact": preact, "act": act}
        | ({"grad_weights": torch.empty(tokens, k, **device)} if outside is not None else {}),
        {"grad_y": grad_y, "weights": outside, "preact": saved["preact"], **expert, **second},
        {"k": k, **form, "turns": are_in_turns(gate)},
        {"grad_preact": used, "act": used},
    )
    run("grad_down", {"grad_down": down}, {"grad_y": grad_y, "act": grads["act"], **expert, "down": down}, {"k": k})
    run(
        "grad_gate_up",
        {"grad_gate": gate, "grad_up": up},
        {"x": x, "weights": inside, "grad_preact": grads["grad_preact"], **expert, **ups},
        {"k": k, "gated": case.gated},
    )
    if case.biased:
        like = {f"grad_{name}": biases[name] for name in ("gate_bias", "up_bias") if biases[name]}
        layouts = {name: biases[name] for name in ("gate_bias", "up_bias")}
        run("grad_gate_up_bias", like, {"grad_preact": grads["grad_preact"], "starts": expert["starts"], **layouts}, {})
        ins = {"grad_y": grad_y, "weights": outside, **expert, "down_bias": biases["down_bias"]}
        run("grad_down_bias", {"grad_down_bias": biases["down_bias"]}, ins, {"k": k})
    back = run(
        "grad_pairs", {"pairs": row}, {"grad_preact": grads["grad_preact"], **expert, **ups}, {"gated": case.gated}
    )
    like = {"grad_weights": torch.empty(tokens, k, **device)}
    run("grad_input_weights", like, {"x": x, "pairs": back["pairs"]}, {"k": k})


@pytest.mark.parametrize("experts", [1, 5, 128, 512])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (700, 8), (511, 16), (1024, 4), (1025, 4), (9000, 8)])
def test_orders(shape: tuple[int, int], experts: int) -> None:
    """Both ways to order, around the sizes of their blocks, with ids out of range and ids that are not contiguous."""
    torch.manual_seed(0)
    run = Runner(f"{shape}", torch.float32)
    pairs = shape[0] * shape[1]
    wide = torch.randint(-2, experts + 2, (shape[0], 2 * shape[1]), device="cuda")
    ordering = {
        "perm": torch.empty(pairs, dtype=torch.int32, device="cuda"),
        "starts": torch.empty(experts + 1, dtype=torch.int32, device="cuda"),
    }
    numbers = {"num_experts": experts}
    for ids in (wide[:, ::2], wide[:, : shape[1]].int(), wide[:, : shape[1]].contiguous()):
        run("order", ordering, {"ids": ids}, numbers)
        counts = run("order_count", {"counts": kernel("order_count").reference(ids, experts)}, {"ids": ids}, numbers)
        run("order_scatter", ordering, {"ids": ids, **counts}, numbers)


ROUTES = [
    {"score": "softmax", "order": "before", "renormalize": True, "clamp": False, "eps": 0.0, "scale": 1.0},
    {"score": "softmax", "order": "before", "renormalize": False, "clamp": False, "eps": 0.0, "scale": 1.0},
    {"score": "softmax", "order": "after", "renormalize": False, "clamp": False, "eps": 0.0, "scale": 2.5},
    {"score": "sigmoid", "order": "before", "renormalize": True, "clamp": False, "eps": 1e-20, "scale": 2.827},
    {"score": "sigmoid", "order": "after", "renormalize": False, "clamp": False, "eps": 0.0, "scale": 1.0},
    {"score": "none", "order": "before", "renormalize": False, "clamp": False, "eps": 0.0, "scale": 1.0},
]
# The choice is by the scores themselves.
NO_GROUPS = {"groups": 1, "kept_groups": 1, "group_top": 1, "fill": "-inf"}
NO_OPERANDS = {"bias": None, "expert_scale": None}


@pytest.mark.parametrize("attrs", ROUTES, ids=lambda a: f"{a['score']}-{a['order']}-{a['renormalize']}")
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 2), (60, 4), (128, 8), (512, 16)])
def test_route(attrs: dict[str, Any], experts: int, k: int) -> None:
    """Choice, weights and gradient. Logits are distinct multiples of 1/8, so that scores of different logits differ."""
    torch.manual_seed(0)
    for tokens, dtype in ((1, torch.float32), (17, torch.bfloat16), (1000, torch.float32), (600, torch.float16)):
        spread = torch.rand(tokens, experts).argsort(1) / 8
        logits = (spread - spread.mean() if attrs["score"] == "softmax" else spread % 8 - 4).to(
            device="cuda", dtype=dtype
        )
        if attrs["score"] == "sigmoid":
            logits = (torch.rand(tokens, experts).argsort(1) * (8 / experts) - 4).to(device="cuda", dtype=dtype)
        run = Runner(f"T={tokens} {dtype}", torch.bfloat16)
        weights = torch.empty(tokens, k, dtype=dtype, device="cuda")
        for score_dtype in (torch.float32, dtype):
            if score_dtype is not torch.float32 and attrs["order"] == "before" and attrs["score"] != "none":
                continue  # rounded scores tie: see test_route_ties
            full = {**attrs, "score_dtype": score_dtype}
            choice = {"k": k, **full, **NO_GROUPS, "dtype": dtype}
            want = kernel("route").reference(logits.cpu(), **NO_OPERANDS, **choice)
            outs = {"weights": weights, "ids": want[1].cuda()}
            _compare_route(run, outs, logits, choice, want)
            grad = torch.randn(tokens, k, dtype=dtype, device="cuda")
            ins = {"grad_weights": grad, "logits": logits, "ids": want[1].cuda(), "expert_scale": None}
            run("route_backward", {"grad_logits": logits}, ins, full)


def _compare_route(
    run: Runner, like: dict[str, Any], logits: Tensor, attrs: dict[str, Any], want: tuple[Tensor, Tensor]
) -> None:
    results = []
    for pdl in (False, True):
        outs = {key: _poisoned(value) for key, value in like.items()}
        kernel("route").launch(outs, {"logits": logits, **NO_OPERANDS}, attrs, pdl=pdl)
        results.append(outs)
    for key in like:
        assert torch.equal(results[0][key], results[1][key]), f"{run.where} route.{key}: PDL changes the result"
    chosen = logits.cpu().gather(1, results[0]["ids"].cpu())
    assert torch.equal(chosen, logits.cpu().gather(1, want[1])), f"{run.where}: other experts were chosen"
    error = (results[0]["weights"].double().cpu() - want[0].double()).norm() / want[0].double().norm()
    assert error < TOLERANCE[torch.bfloat16], f"{run.where}: weights differ by {error:.3g}"


# (experts, k, groups, kept_groups, group_top, fill): groups of powers of two and of others, of one, and none.
CHOICES = [
    (256, 8, 8, 4, 2, "-inf"),
    (160, 6, 8, 3, 1, "0"),
    (12, 3, 4, 2, 2, "0"),
    (60, 4, 5, 2, 3, "-inf"),
    (9, 3, 9, 4, 1, "-inf"),
    (6, 6, 2, 1, 1, "-inf"),
    (512, 16, 1, 1, 1, "-inf"),
    (7, 7, 1, 1, 1, "0"),
]


@pytest.mark.parametrize("operands", [(True, False), (False, True), (True, True)], ids=["bias", "scale", "both"])
@pytest.mark.parametrize(
    "attrs", [*ROUTES, {**ROUTES[3], "clamp": True, "eps": 2.0}], ids=lambda a: "-".join(map(str, a.values()))
)
@pytest.mark.parametrize("case", CHOICES, ids=lambda c: "-".join(map(str, c)))
def test_route_with_bias_groups_and_scale(
    case: tuple[Any, ...], attrs: dict[str, Any], operands: tuple[bool, bool]
) -> None:
    """The chosen entries are the reference's up to the rounding of a score, and so are weights and gradients."""
    torch.manual_seed(0)
    experts, k, groups, kept_groups, group_top, fill = case
    for tokens, dtype, other in (
        (1, torch.float32, torch.float32),
        (17, torch.bfloat16, torch.float32),
        (600, torch.float32, torch.bfloat16),
    ):
        # Of equal groups either may be kept, so logits that are often equal only where there are none.
        logits = torch.randn(tokens, experts).to(dtype if groups == 1 else torch.float32)
        numbers = torch.stack(
            [torch.linspace(-1.5, 0.5, experts)[torch.randperm(experts)], torch.rand(experts) + 0.5], 1
        )
        bias, scale = (n.to(other) if there else None for n, there in zip(numbers.unbind(1), operands, strict=True))
        full = {**attrs, "score_dtype": torch.float32}
        limits = {"groups": groups, "kept_groups": kept_groups, "group_top": group_top, "fill": fill}
        choice = {"k": k, **full, **limits, "dtype": torch.float32}
        want = kernel("route").reference(logits, bias, scale, **choice)
        results = []
        for pdl in (False, True):
            outs = {"weights": _poisoned(want[0].cuda()), "ids": _poisoned(want[1].cuda())}
            # Operands with a stride of their own.
            device = {"bias": _strided(bias), "expert_scale": _strided(scale)}
            kernel("route").launch(outs, {"logits": logits.cuda(), **device}, choice, pdl=pdl)
            results.append({key: value.cpu() for key, value in outs.items()})
        assert all(torch.equal(results[0][key], results[1][key]) for key in results[0]), "PDL changes the result"
        weights, ids = results[0]["weights"], results[0]["ids"]
        assert ((ids >= 0) & (ids < experts)).all() and (ids.sort(1).values.diff(dim=1) > 0).all()
        scored = kernel("route").reference(
            logits, None, None, **{**choice, **NO_GROUPS, "k": experts, "renormalize": False, "scale": 1.0}
        )
        scores = torch.empty(tokens, experts).scatter(1, scored[1], scored[0]) if attrs["order"] == "before" else logits
        by = scores if bias is None else scores + bias
        if groups > 1:
            by = _limited(by, **limits)
        torch.testing.assert_close(by.gather(1, ids), by.gather(1, want[1]), rtol=1e-5, atol=1e-6)
        same = (ids == want[1]).all(1)
        # Of equal scores the reference may take another: those of narrow logits, and what a group's fill leaves.
        ties = dtype is torch.bfloat16 or fill == "0" or kept_groups * (experts // groups) < k
        assert ties or same.float().mean() > 0.9
        torch.testing.assert_close(weights[same], want[0][same], rtol=1e-4, atol=1e-5)
        grad = torch.randn(tokens, k).cuda()
        ins = {"grad_weights": grad, "logits": logits.cuda(), "ids": want[1].cuda(), "expert_scale": _strided(scale)}
        like = {"grad_logits": logits.cuda()} | ({"grad_expert_scale": scale.cuda()} if scale is not None else {})
        Runner(f"T={tokens} {dtype}", torch.bfloat16)("route_backward", like, ins, full)


def _strided(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else torch.stack([numbers, numbers], 1).cuda()[:, 0]


def _route(logits: Tensor, k: int, **changes: Any) -> tuple[Tensor, Tensor]:
    attrs = {**ROUTES[0], **NO_GROUPS, "score_dtype": torch.float32, "dtype": torch.float32, **changes}
    outs = {
        "weights": torch.empty(logits.shape[0], k, dtype=attrs["dtype"], device="cuda"),
        "ids": torch.empty(logits.shape[0], k, dtype=torch.int64, device="cuda"),
    }
    kernel("route").launch(outs, {"logits": logits, **NO_OPERANDS}, {"k": k, **attrs}, pdl=True)
    torch.cuda.synchronize()
    return outs["weights"], outs["ids"]


def test_route_ties() -> None:
    """Of equal scores the smallest index comes first; -0 equals 0."""
    logits = torch.zeros(3, 12, device="cuda")
    logits[1, 5:9] = 1.0
    logits[2, ::2] = -0.0
    _, ids = _route(logits, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [0, 1, 2, 3]]


def test_route_odd_values() -> None:
    """NaN counts as the largest, as in torch.topk; infinities break no row; ids are always distinct and in range."""
    logits = torch.randn(5, 16, device="cuda")
    logits[0] = float("nan")
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    logits[3, 7] = float("inf")
    logits[4, :12] = float("-inf")
    for order in ("before", "after"):
        for score in ("softmax", "sigmoid", "none"):
            _, ids = _route(logits, 8, order=order, score=score, renormalize=False)
            assert ((ids >= 0) & (ids < 16)).all()
            assert all(len(set(row)) == 8 for row in ids.tolist())
    assert _route(logits, 8, order="after")[1][1, 0] == 3


@pytest.mark.parametrize("layout", ["packed", "separate", "list"])
def test_no_tokens(layout: str) -> None:
    """Without tokens the starts and the gradients of weights and biases are still written."""
    case = Case(5, 2, 64, 32, layout=layout, biased=True)
    gate, up, down = weights_of(case)
    biases = biases_of(case, gate, up, down)
    ids = torch.empty(0, 2, dtype=torch.int64, device="cuda")
    perm = torch.empty(0, dtype=torch.int32, device="cuda")
    starts = torch.full((6,), 7, dtype=torch.int32, device="cuda")
    counts = torch.empty(0, 5, dtype=torch.int32, device="cuda")
    for name, ins in (("order", {"ids": ids}), ("order_scatter", {"ids": ids, "counts": counts})):
        starts.fill_(7)
        kernel(name).launch({"perm": perm, "starts": starts}, ins, {"num_experts": 5}, pdl=False)
        assert not starts.any(), name
    rows = {
        "x": gate[0].new_empty(0, 64),
        "grad_y": gate[0].new_empty(0, 64),
        "act": gate[0].new_empty(0, 32),
        "grad_preact": gate[0].new_empty(0, 64),
        "weights": gate[0].new_empty(0, 2),
        "perm": perm,
        "starts": starts,
    }
    tensors = {"gate": gate, "up": up, "down": down, **biases}
    for name, attrs in (
        ("grad_down", {"k": 2}),
        ("grad_gate_up", {"k": 2, "gated": True}),
        ("grad_down_bias", {"k": 2}),
        ("grad_gate_up_bias", {}),
    ):
        traits = kernel(name).traits
        grads = {write: _map(tensors[write.removeprefix("grad_")], _poisoned) for write in traits.writes}
        ins = {key: (rows | tensors)[key] for key in traits.reads}
        kernel(name).launch(grads, ins, attrs, pdl=False)
        for write, made in grads.items():
            assert not any(grad.any() for grad in made), f"{name}.{write}"


def test_grad_y_of_another_dtype() -> None:
    """grad_y may be wider than the compute type, and need not be contiguous."""
    torch.manual_seed(0)
    case = Case(8, 2, 128, 64)
    gate, up, down = weights_of(case)
    tokens, pairs = 33, 66
    run = Runner("wide grad_y", case.dtype)
    ids = routing(case, tokens).cuda()
    ordering = {
        "perm": torch.empty(pairs, dtype=torch.int32, device="cuda"),
        "starts": torch.empty(9, dtype=torch.int32, device="cuda"),
    }
    expert = run("order", ordering, {"ids": ids}, {"num_experts": 8})
    preact = torch.randn(pairs, 128, device="cuda").bfloat16()
    act = torch.randn(pairs, 64, device="cuda").bfloat16()
    weights = torch.rand(tokens, 2, device="cuda")
    for grad_y in (
        torch.randn(tokens, 128, device="cuda").bfloat16().float(),
        torch.ones(1, 1, device="cuda").expand(tokens, 128),
    ):
        like = {"grad_preact": preact, "act": act, "grad_weights": torch.empty(tokens, 2, device="cuda")}
        ins = {"grad_y": grad_y, "weights": weights, "preact": preact, **expert, "down": down, "down_bias": None}
        run("grad_act", like, ins, {"k": 2, "activation": "silu", "gated": True})
        run("grad_down", {"grad_down": down}, {"grad_y": grad_y, "act": act, **expert, "down": down}, {"k": 2})
    assert gate
    assert not up


def test_float64_is_refused() -> None:
    pairs = torch.zeros(4, 8, dtype=torch.float64, device="cuda")
    with pytest.raises(NotImplementedError, match="float64"):
        kernel("combine").launch(
            {"y": pairs[:2]}, {"pairs": pairs, "weights": None}, {"k": 2, "dtype": torch.float64}, pdl=False
        )


def test_uneven_experts_are_refused() -> None:
    down = [torch.zeros(8, 16, device="cuda"), torch.zeros(8, 8, device="cuda")]
    rows = torch.zeros(2, 16, device="cuda")
    expert = {
        "perm": torch.zeros(2, dtype=torch.int32, device="cuda"),
        "starts": torch.zeros(3, dtype=torch.int32, device="cuda"),
    }
    with pytest.raises(WeightLayoutError, match="expert 1"):
        kernel("down").launch({"pairs": rows[:, :8]}, {"act": rows, **expert, "down": down}, {}, pdl=False)


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("layout", ["packed", "list"])
def test_chain_in_a_graph(layout: str, tokens: int) -> None:
    """A forward chain with PDL, captured: replays follow new inputs, and agree with eager launches bit by bit."""
    torch.manual_seed(0)
    case = Case(8, 2, 256, 128, layout=layout)
    gate, up, down = weights_of(case)
    pairs = tokens * 2
    cuda = {"device": "cuda"}
    x, logits = torch.randn(tokens, 256, **cuda).bfloat16(), torch.randn(tokens, 8, **cuda)
    weights, ids = torch.empty(tokens, 2, **cuda), torch.empty(tokens, 2, dtype=torch.int64, **cuda)
    perm, starts = torch.empty(pairs, dtype=torch.int32, **cuda), torch.empty(9, dtype=torch.int32, **cuda)
    act, rows = torch.empty(pairs, 128, **cuda).bfloat16(), torch.empty(pairs, 256, **cuda).bfloat16()
    y = torch.empty_like(x)

    def chain(pdl: bool) -> None:
        attrs = {"k": 2, **ROUTES[0], **NO_GROUPS, "score_dtype": torch.float32, "dtype": torch.float32}
        route = {"logits": logits, **NO_OPERANDS}
        kernel("route").launch({"weights": weights, "ids": ids}, route, attrs, pdl=pdl)
        expert = {"perm": perm, "starts": starts}
        kernel("order").launch(expert, {"ids": ids}, {"num_experts": 8}, pdl=pdl)
        ins = {"x": x, "weights": None, **expert, "gate": gate, "up": up}
        form = {"k": 2, "activation": "silu", "gated": True, "save": False}
        kernel("gate_up").launch({"act": act}, ins, form, pdl=pdl)
        kernel("down").launch({"pairs": rows}, {"act": act, **expert, "down": down}, {}, pdl=pdl)
        kernel("combine").launch({"y": y}, {"pairs": rows, "weights": weights}, {"k": 2, "dtype": y.dtype}, pdl=pdl)

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            chain(True)
    for _ in range(3):
        x.normal_()
        logits.normal_()
        chain(False)
        want = y.clone()
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, want)

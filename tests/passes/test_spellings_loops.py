"""Loops, gathered and dense blocks, each in several spellings x dtype x grad mode x static or symbolic T.

Every case must give one match, float64 accuracy of outputs and gradients, None and zero gradients where eager has them,
recorded metadata that the operators do compute, and pass lists that find nothing to do the second time. The fast cases
take two of the eight ways to run a spelling, and all eight for a formulation; the others are marked slow.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler import compilation
from moe_compiler.backend import last_reports
from moe_compiler.graph_pass import fake_mode_of_graph
from moe_compiler.testing import examples, run_passes
from tests.fast_part import covering, one_in
from tests.passes import spellings
from tests.passes.numerics import SLACK, _Choices, _Double, compile_eager, raised_agrees
from tests.passes.spellings import Block, E, H, I, K, Spelling, choose
from tests.properties.check import run_phase_twice

CAPTURE = ("canonicalize", "find_moe", "raise_moe")


def halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(gate, up), counted from the end."""
    parts = rows.chunk(2, dim=-1)
    return parts[-2], parts[-1]


def batched_inside(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    flat = ids.reshape(-1)
    gate, up = halves(torch.bmm(b.gate_up[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1))
    act = F.silu(gate) * up * weights.reshape(-1, 1)
    return torch.bmm(b.down[flat], act.unsqueeze(-1)).view(-1, K, H).sum(1)


def batched_by_element(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Rows in pair order by gather, with an index for each element."""
    weights, ids = choose(x, logits)
    flat, token = ids.reshape(-1), torch.arange(x.shape[0] * K, device=x.device) // K
    rows = torch.gather(x, 0, token[:, None].expand(-1, H)).unsqueeze(-1)
    gate, up = halves(torch.bmm(b.gate_up[flat], rows).squeeze(-1))
    rows = torch.bmm(b.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (rows * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


def einsum_rounded_inside(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Routing weights in fp32, rounded to the activation's dtype for their product with it."""
    weights, ids = torch.topk(torch.softmax(logits.float(), dim=-1), K, dim=-1)
    gate, up = halves(torch.einsum("th,tkhi->tki", x, b.gate_up_t[ids]))
    act = F.silu(gate) * up * weights.unsqueeze(-1).to(x.dtype)
    return torch.einsum("tki,tkih->tkh", act, b.down_t[ids]).sum(1)


def einsum_inside(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    gate, up = halves(torch.einsum("th,tkhi->tki", x, b.gate_up_t[ids]))
    return torch.einsum("tki,tkih->tkh", weights[..., None] * (up * F.silu(gate)), b.down_t[ids]).sum(1)


def dense_inside(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Scores by a comparison with all experts, on the activations."""
    weights, ids = choose(x, logits)
    chosen = ids[..., None] == torch.arange(E, device=x.device)
    scores = (chosen.to(x.dtype) * weights[..., None]).sum(dim=1)
    gate, up = halves(torch.matmul(x.expand(E, -1, -1), b.gate_up_t))
    return torch.bmm(F.silu(gate) * up * scores.t()[..., None], b.down_t).sum(0)


def dense_chosen_twice(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """One top-k for the ids and the same once more for the logits that are scattered."""
    ids, values = torch.topk(logits, K, dim=-1)[1], torch.topk(logits, K, dim=-1)[0]
    scores = torch.softmax(torch.full_like(logits, float("-inf")).scatter(1, ids, values), dim=-1)
    gate, up = halves(torch.matmul(x.expand(E, -1, -1), b.gate_up_t))
    return (torch.bmm(F.silu(gate) * up, b.down_t) * scores.t()[..., None]).sum(0)


def one_hot_inside(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The weight in front of the down projection, and a squeeze that drops nothing (transformers 5)."""
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    masks = F.one_hot(ids, E).permute(2, 1, 0)
    for e in range(E):
        choice, token = torch.where(masks[e].squeeze(0))
        gate, up = halves(x[token] @ b.gate_up_t[e])
        rows = (F.silu(gate) * up * weights[token, choice, None]) @ b.down_t[e]
        result = result.index_add(0, token, rows)
    return result


def one_hot_compared(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """All masks at once, by a comparison."""
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    masks = (ids.unsqueeze(-1) == torch.arange(E, device=x.device)).permute(2, 0, 1)
    for e, expert in enumerate(b.experts):
        token, choice = masks[e].nonzero(as_tuple=True)
        result.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
    return result


def where_inside(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        token, choice = torch.where(ids == e)
        act = weights[token, choice].unsqueeze(1) * (F.silu(expert.w1(x[token])) * expert.w3(x[token]))
        result[token] += expert.w2(act)
    return result


def where_columns(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """nonzero as a matrix whose columns are selected; packed weights; rows gathered and scattered by element."""
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    for e in range(E):
        pairs = (ids == e).nonzero()
        token, choice = pairs[:, 0], pairs[:, 1]
        rows = torch.gather(x, 0, token[:, None].expand(-1, H))
        gate, up = F.linear(rows, b.gate_up[e]).split(I, dim=-1)
        rows = F.linear(F.silu(gate) * up, b.down[e]) * weights[token, choice, None]
        result = result.scatter_add(0, token[:, None].expand(-1, H), rows)
    return result


def where_cast_inside(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Weights and routing weights cast in the loop, once an expert."""
    weights, ids = torch.topk(torch.softmax(logits.float(), dim=-1), K, dim=-1)
    result = torch.zeros_like(x)
    for e in range(E):
        token, choice = torch.where(ids == e)
        gate, up = halves(F.linear(x[token], b.gate_up[e].to(x.dtype)))
        rows = F.linear(F.silu(gate) * up, b.down.to(x.dtype)[e])
        result.index_add_(0, token, rows * weights.to(x.dtype)[token, choice, None])
    return result


def where_cast_rows(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Each expert's own weights cast once they are gathered."""
    weights, ids = torch.topk(torch.softmax(logits.float(), dim=-1), K, dim=-1)
    result = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        token, choice = torch.where(ids == e)
        result[token] += expert(x[token]) * weights[token, choice].to(x.dtype)[:, None]
    return result


def one_hot_cast_inside(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = torch.topk(torch.softmax(logits.float(), dim=-1), K, dim=-1)
    result = torch.zeros_like(x)
    masks = F.one_hot(ids, E).permute(2, 1, 0)
    for e, expert in enumerate(b.experts):
        choice, token = torch.where(masks[e])
        rows = expert(x[token] * weights.to(x.dtype)[token, choice, None])
        result.index_add_(0, token, rows.to(x.dtype))
    return result


def single(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One expert a token: weights [T] and ids [T], without a dimension for the choice."""
    weights, ids = torch.softmax(logits.float(), dim=-1).max(dim=-1)
    return weights.to(dtype), ids


def where_single(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = single(logits, x.dtype)
    result = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        (token,) = torch.where(ids == e)
        result = result.index_add(0, token, expert(x[token]) * weights[token, None])
    return result


def where_single_written(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """argmax, and the score gathered at it; rows written, since no other expert has them; the index as a column."""
    scores = torch.softmax(logits, dim=-1)
    ids = scores.argmax(-1)
    weights = scores.gather(1, ids.unsqueeze(-1))
    result = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        token = (ids == e).nonzero()[:, 0]
        result[token] = expert(x[token]) * weights[token]
    return result


def where_masked(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The comparison itself as the index."""
    weights, ids = single(logits, x.dtype)
    result = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        mask = ids == e
        result[mask] = weights[mask].unsqueeze(1) * expert(x[mask])
    return result


def where_masked_column(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """A top-k of one, masks [T, 1] without their last dimension, the weight on the tokens, rows added."""
    weights, ids = torch.topk(torch.sigmoid(logits), 1, dim=-1)
    result = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        mask = (ids == e).squeeze(-1)
        result[mask] += expert(x[mask] * weights[mask])
    return result


def one_hot_single(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = single(logits, x.dtype)
    result = torch.zeros_like(x)
    masks = F.one_hot(ids, E).T
    for e, expert in enumerate(b.experts):
        token = torch.nonzero(masks[e]).squeeze(-1)
        result.index_add_(0, token, weights[token].view(-1, 1) * expert(x[token]))
    return result


def one_hot_masked(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = single(logits, x.dtype)
    result = torch.zeros_like(x)
    masks = F.one_hot(ids, E).bool()
    for e, expert in enumerate(b.experts):
        mask = masks[:, e]
        result[mask] += expert(x[mask]) * weights[mask][:, None]
    return result


def _of(name: str, *keys: str) -> dict[str, Spelling]:
    return {key: spellings.SPELLINGS[name][key] for key in keys}


SPELLINGS: dict[str, dict[str, Spelling]] = {
    "batched_mm": {
        "inside": batched_inside,
        "by_element": batched_by_element,
        **_of("batched_mm", "transposed", "einsum", "scattered"),
    },
    "gather_einsum": {
        "inside": einsum_inside,
        "rounded_inside": einsum_rounded_inside,
        **_of("gather_einsum", "bmm_sum", "matmul", "transposed"),
    },
    "dense_bmm": {
        "inside": dense_inside,
        "chosen_twice": dense_chosen_twice,
        **_of("dense_bmm", "softmax_output", "scattered_weights", "broadcast_input"),
    },
    "one_hot_loop": {
        "inside": one_hot_inside,
        "compared": one_hot_compared,
        "cast_inside": one_hot_cast_inside,
        "single": one_hot_single,
        "masked": one_hot_masked,
        **_of("one_hot_loop", "packed", "weighted_input"),
    },
    "where_loop": {
        "inside": where_inside,
        "columns": where_columns,
        "cast_inside": where_cast_inside,
        "cast_rows": where_cast_rows,
        "single": where_single,
        "single_written": where_single_written,
        "masked": where_masked,
        "masked_column": where_masked_column,
        **_of("where_loop", "index_add", "unbound"),
    },
}


@dataclass(frozen=True)
class Way:
    """How a spelling is run."""

    dtype: torch.dtype
    training: bool
    dynamic: bool

    def __str__(self) -> str:
        words = str(self.dtype)[6:], "training" if self.training else "inference", "dynamic" if self.dynamic else ""
        return "-".join(filter(None, words))


WAYS = [
    Way(dtype, training, dynamic)
    for dtype in (torch.float32, torch.bfloat16)
    for training in (False, True)
    for dynamic in (False, True)
]
CASES = [
    pytest.param(
        name, key, way, id=f"{name}-{key}-{way}", marks=() if place == at % 8 else pytest.mark.slow
    )
    for name, written in SPELLINGS.items()
    for at, key in enumerate(written)
    for place, way in enumerate(WAYS)
]  # fmt: skip


Results = tuple[Tensor, list[Tensor | None]]


def run(model: object, parameters: list[Tensor], x: Tensor, tangent: Tensor, way: Way) -> Results:
    """The output, and the gradients of x and the parameters in training."""
    x = x.detach().requires_grad_(way.training)
    with torch.set_grad_enabled(way.training):
        y = model(x)  # type: ignore[operator]
    if not way.training:
        return y, []
    return y.detach(), list(torch.autograd.grad(y, [x, *parameters], tangent.to(y.dtype), allow_unused=True))


# Squared norms of our error, eager's, and the reference, by what was computed: experts of a list count as one, since
# the error of few numbers is up to chance.
Sums = dict[str, list[float]]


def check(module: Block, compiled: object, count: int, way: Way, sums: Sums) -> None:
    """Add the errors of one run to `sums`; gradients must be None and zero where eager's are."""
    x, tangent = torch.randn(count, H, dtype=way.dtype), torch.randn(count, H, dtype=torch.float64)
    with torch.no_grad(), _Choices() as choices:
        module(x)
    plain, plain_grads = run(module, list(module.parameters()), x, tangent, way)
    mine, grads = run(compiled, list(module.parameters()), x, tangent, way)
    double = copy.deepcopy(module).double()
    with _Double(choices.ids):
        exact, exact_grads = run(double, list(double.parameters()), x.double(), tangent, way)
    assert [g is None for g in grads] == [g is None for g in plain_grads]
    names = ["y", "x", *(re.sub(r"\d+", "#", name) for name, _ in module.named_parameters())][: 1 + len(grads)]
    results = [(mine, plain, exact), *zip(grads, plain_grads, exact_grads, strict=True)]
    for name, (ours, eager, reference) in zip(names, results, strict=True):
        if ours is None or eager is None or reference is None:
            continue
        assert (ours.dtype, ours.shape) == (eager.dtype, eager.shape)
        errors = (ours.double() - reference).norm(), (eager.double() - reference).norm(), reference.norm()
        total = sums.setdefault(name, [0.0, 0.0, 0.0])
        for index, norm in enumerate(errors):
            total[index] += float(norm) ** 2
        if name not in ("y", "x") and eager.numel():  # what no token chose stays zero
            rows = (eager.reshape(eager.shape[0], -1) == 0).all(-1)
            assert not ours[rows].count_nonzero(), f"{name} is not zero where eager's is"


@pytest.mark.parametrize(("name", "key", "way"), CASES)
def test_a_spelling_is_one_block_and_right(name: str, key: str, way: Way) -> None:
    module = Block(SPELLINGS[name][key], way.dtype).train(way.training)
    compiled = compile_eager(module, dynamic=True if way.dynamic else None)
    before = last_reports()
    sums: Sums = {}
    with mock.patch.object(compilation, "run_phase", run_phase_twice):
        for count in (6, 37, 2) if way.dynamic else (19,):
            check(module, compiled, count, way, sums)
    for what, squares in sums.items():
        error, own, norm = (value**0.5 for value in squares)
        bound = 1.5 * own + SLACK[way.dtype] * norm + 1e-12
        assert error <= bound, f"{what}: error {error:.2e}, eager's own {own:.2e}, norm {norm:.2e}"
    reports = [report for report in last_reports() if not any(report is old for old in before)]
    assert reports and not any(report.errors for report in reports)
    for report in reports:
        assert [match.formulation for match in report.matches] == [name], report.misses
        assert not report.matches[0].left_alone and not report.misses
        assert report.matches[0].sizes["T"].isdigit() != way.dynamic


class MasterWeights(torch.nn.Module):
    """Parameters in fp32, tokens in bf16: each loop casts what it reads."""

    def __init__(self, experts: str) -> None:
        super().__init__()
        self.block, self.experts = Block(lambda b, x, logits: None), experts

    def forward(self, x: Tensor) -> Tensor:
        b, dtype = self.block, x.dtype
        weights, ids = torch.topk(torch.softmax(F.linear(x.float(), b.router), dim=-1), K, dim=-1)
        result = torch.zeros_like(x)
        for e, expert in enumerate(b.experts):
            token, choice = torch.where(ids == e)
            if self.experts == "packed":
                gate, up = halves(F.linear(x[token], b.gate_up[e].to(dtype)))
                rows = F.linear(F.silu(gate) * up, b.down.to(dtype)[e])
            else:
                w1, w2, w3 = (linear.weight.to(dtype) for linear in (expert.w1, expert.w2, expert.w3))
                rows = F.linear(F.silu(F.linear(x[token], w1)) * F.linear(x[token], w3), w2)
            result.index_add_(0, token, rows * weights.to(dtype)[token, choice, None])
        return result


@pytest.mark.parametrize(("experts", "training"), covering(["packed", "list"], [False, True]))
def test_a_loop_that_casts_its_weights_is_one_block(experts: str, training: bool) -> None:
    report = raised_agrees(
        MasterWeights(experts), torch.randn(23, H, dtype=torch.bfloat16), training=training, repeats=6
    )
    (match,) = report.matches
    assert match.formulation == "where_loop" and match.router == "R3 softmax, top-k"
    assert match.attributes["layout"] == ("packed" if experts == "packed" else "per expert")


@pytest.mark.parametrize("index", ["mask", "where", "one_hot"])
def test_bare_ids_of_one_expert_a_token_that_nothing_chose_are_one_block(index: str) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(lambda b, x, logits: None)

        def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            result = torch.zeros_like(x)
            masks = F.one_hot(ids, E).T if index == "one_hot" else ()
            for e, expert in enumerate(self.block.experts):
                picked = masks[e].nonzero()[:, 0] if index == "one_hot" else ids == e
                picked = torch.where(picked)[0] if index == "where" else picked
                result[picked] += expert(x[picked]) * weights[picked, None]
            return result

    module, x, weights, ids = Module(), torch.randn(5, H), torch.rand(5), torch.randint(0, E, (5,))
    compiled = compile_eager(module)
    torch.testing.assert_close(compiled(x, weights, ids), module(x, weights, ids))
    (match,) = last_reports()[-1].matches
    assert match.sizes["k"] == "1" and match.formulation == ("one_hot_loop" if index == "one_hot" else "where_loop")
    ids[1], ids[3] = E, -1
    if index == "one_hot":
        for run in (module, compiled):
            with pytest.raises(RuntimeError):
                run(x, weights, ids)
    else:
        torch.testing.assert_close(compiled(x, weights, ids), module(x, weights, ids))


def described(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(map(described, value))
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(map(str, value.shape)), tuple(map(str, value.stride()))


# Each spelling with symbolic sizes or without, in turn; with the other of the two it is slow.
KEYS = [(name, key) for name, written in SPELLINGS.items() for key in written]
RECORDED = [
    pytest.param(
        *names, dynamic, id=f"{'-'.join(names)}-{how}", marks=() if (at + place) % 2 == 0 else pytest.mark.slow
    )
    for at, names in enumerate(KEYS)
    for place, (dynamic, how) in enumerate(((None, "static"), (True, "dynamic")))
]


@pytest.mark.parametrize(("name", "key", "dynamic"), RECORDED)
def test_recorded_metadata_is_what_the_operators_compute(name: str, key: str, dynamic: bool | None) -> None:
    after, report = run_passes(Block(SPELLINGS[name][key]), CAPTURE, torch.randn(5, H), dynamic=dynamic)
    assert [match.formulation for match in report.matches] == [name]
    mode = fake_mode_of_graph(after.graph)
    assert mode is not None
    for node in after.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode, torch.no_grad():
            assert described(node.target(*args, **kwargs)) == described(node.meta["val"]), node.format_node()


def with_identities(order: tuple[int, ...]) -> Spelling:
    """LongCat: a one-hot encoding over E + 2 experts, of which the last two give their tokens back as they are."""

    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        logits = torch.cat([logits, logits[:, :1] * 0.7, logits[:, 1:2] * 1.3], dim=-1)
        weights, ids = choose(x, logits)
        result = torch.zeros_like(x)
        masks = F.one_hot(ids, E + 2).permute(2, 1, 0)
        for e in order:
            choice, token = torch.where(masks[e].squeeze(0))
            rows = x[token] if e >= E else b.experts[e](x[token])
            result.index_add_(0, token, rows * weights[token, choice, None])
        return result

    return spelling


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3], WAYS[6]], ids=str)
def test_experts_without_weights_stay_behind_the_block(way: Way) -> None:
    module = Block(with_identities(tuple(range(E + 2))), way.dtype)
    compiled, sums = compile_eager(module, dynamic=True if way.dynamic else None), {}
    with mock.patch.object(compilation, "run_phase", run_phase_twice):
        check(module, compiled, 37, way, sums)
    for error, own, norm in ((value**0.5 for value in squares) for squares in sums.values()):
        assert error <= 1.5 * own + SLACK[way.dtype] * norm + 1e-12
    (match,) = last_reports()[-1].matches
    assert (match.formulation, match.sizes["E"]) == ("one_hot_loop", str(E))


@pytest.mark.parametrize(
    ("order", "words"),
    [((4, 0, 1, 2, 3, 5), "adds its tokens before others"), ((0, 1, 2, 4, 5), "expert 3 of 6 never picks")],
)
def test_experts_without_weights_elsewhere_are_refused(order: tuple[int, ...], words: str) -> None:
    _, report = run_passes(Block(with_identities(order)), CAPTURE, torch.randn(5, H))
    assert not report.matches and words in report.misses[0].reason


GROUPED = ("grouped_mm", "grouped_scatter", "grouped_top1")
# Their assertions, or their own sizes, are about one T.
OF_ONE_T = ("capacity", "drop_and_pad")


@pytest.mark.parametrize("name", one_in(3, examples()))
def test_an_example_is_found_in_a_decomposed_program(name: str) -> None:
    """unbind is written out as slices, one_hot as a comparison, a product with one matrix as E products."""
    dtype = torch.bfloat16 if name in GROUPED else torch.float32
    example = examples()[name](dtype, experts=E, top_k=K, hidden=H, intermediate=I)
    module = example.module.requires_grad_(False)
    sizes = None if name in OF_ONE_T else [{0: torch.export.Dim("tokens", min=2, max=4096)}]
    program = torch.export.export(module, example.inputs(9), dynamic_shapes=sizes).run_decompositions()
    compiled = compile_eager(program.module(), dynamic=True if sizes else None)
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    with mock.patch.object(compilation, "run_phase", run_phase_twice):
        for count in (9, 40) if sizes else (9,):
            inputs = example.inputs(count)
            torch.testing.assert_close(compiled(*inputs), module(*inputs), rtol=bound, atol=bound)
    (match,) = last_reports()[-1].matches
    assert match.formulation in (name, "batched_mm" if name == "gather_einsum" else name)
    assert not last_reports()[-1].misses


GATHERED = ("batched_mm", "gather_einsum", "dense_bmm")
EXPORTED = [
    ("batched_mm", "transposed"),
    ("batched_mm", "added"),
    ("gather_einsum", "matmul"),
    ("gather_einsum", "transposed"),
    ("dense_bmm", "scattered_weights"),
]
PROGRAMS = [(name, key) for name in GATHERED for key in {**spellings.SPELLINGS[name], **SPELLINGS[name]}]


@pytest.mark.parametrize(
    ("name", "key"),
    [pytest.param(*case, marks=() if case in EXPORTED else pytest.mark.slow) for case in PROGRAMS],
)
def test_a_spelling_is_found_in_a_decomposed_program(name: str, key: str) -> None:
    """torch.export writes products and einsums out as views, permutations and one bmm each."""
    module = Block({**spellings.SPELLINGS[name], **SPELLINGS[name]}[key])
    sizes = [{0: torch.export.Dim("tokens", min=2, max=4096)}]
    program = torch.export.export(module, (torch.randn(9, H),), dynamic_shapes=sizes).run_decompositions()
    compiled = compile_eager(program.module(), dynamic=True)
    with mock.patch.object(compilation, "run_phase", run_phase_twice), torch.no_grad():
        for count in (9, 40):
            x = torch.randn(count, H)
            torch.testing.assert_close(compiled(x), module(x))
    (match,) = last_reports()[-1].matches
    # Written out, a product of [T, K, ..] is one of [T * K, ..].
    assert match.formulation in (name, "batched_mm" if name == "gather_einsum" else name)

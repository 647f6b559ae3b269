"""A chain on a second stream beside a shared expert: when, where start and wait stand, what must hold, its numbers."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from moe_compiler import device
from moe_compiler.backend import last_reports
from moe_compiler.branches import FEW_ROWS
from moe_compiler.errors import PassError, VerifyError
from moe_compiler.graph_pass import GraphPass, insert
from moe_compiler.launch import with_pdl
from moe_compiler.moe_ir import Level, op_name
from moe_compiler.passes.chain_pdl import chain_pdl
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.passes.join_router import join_router
from moe_compiler.passes.lower import lower
from moe_compiler.pdl_rules import Trigger
from moe_compiler.pipeline import run_passes, run_phase
from moe_compiler.report import Report
from moe_compiler.verify import check_chain, check_flights
from tests.fast_part import covering, one_in
from tests.moe_compiler import shared_expert
from tests.moe_compiler.graphs import EXPERTS, ROUTE, E, H, I, K, S, calls, context, layers
from tests.moe_compiler.test_branches import MODEL

TABLE = replace(
    MODEL, kernels={**MODEL.kernels, **dict.fromkeys(("router_logits", "gate_up_few"), MODEL.kernels["down"])}
)
TABLE = replace(TABLE, kernels={**TABLE.kernels, **dict.fromkeys(("down_few", "order_count"), MODEL.kernels["down"])})


@pytest.fixture
def hopper(monkeypatch):
    """The compiler's view of a machine with an sm_90 GPU and a table of it; nothing is launched."""
    monkeypatch.setattr(device, "why_no_pdl", lambda kind: "")
    monkeypatch.setattr(device, "cost_model", lambda kind: TABLE)


def phase(module, **options):
    ctx = context(**options)
    run_phase(module, "graph", ctx)
    return ctx


def order(module) -> list[str]:
    """Starts, waits and matmuls in graph order, and the additions that meet a chain's result."""
    shown = {"chain_start": "start", "chain_wait": "wait", "mm": "mm", "add": "add", "chain": "chain"}
    return [shown[op_name(node)] for node in module.graph.nodes if op_name(node) in shown]


# Where


@pytest.mark.parametrize("first", [False, True])
def test_the_branch_stands_between_start_and_wait_wherever_it_stood(hopper, first):
    module = layers(count=3, first=first)
    ctx = phase(module)
    assert order(module) == ["start", "mm", "mm", "mm", "wait", "add"] * 3 + ["mm"]
    (start, *_), (wait, *_) = (
        [node for node in module.graph.nodes if op_name(node) == name] for name in ("chain_start", "chain_wait")
    )
    assert start.args[2:] == (4, True) and wait.args[0] is start
    assert wait.args[1] == start.args[0] and wait.args[3] == start.args[1]
    assert [op_name(node) for node in wait.args[2]] == ["mm"], "only the last matmul of the branch"
    assert {op_name(reader) for item in wait.users for reader in item.users} == {"add"}
    (told,) = ctx.report.dags[0].folded_branches()
    assert told.count == 3 and told.overlapped and told.limit == 4
    assert str(told).endswith("the chain has a second stream for T <= 4 (predicted to gain, in CUDA graphs)")
    line = f"second stream: forward 3 chains beside a branch of 3 matmuls, T <= 4, gain {told.gain_us:.1f} us predicted"
    assert f"  {line} at T=4 (predicted to gain, in CUDA graphs)" in str(ctx.report).splitlines()
    assert Report.from_dict(ctx.report.to_dict()) == ctx.report


def test_a_start_stands_right_behind_the_last_of_its_operands(hopper):
    module = layers()
    phase(module, disable=["join_router"])
    start = next(node for node in module.graph.nodes if op_name(node) == "chain_start")
    assert start.prev in start.args[0] and op_name(start.prev) == "mm", "the router's logits"


def test_whoever_reads_or_overwrites_moves_behind_the_wait(hopper):
    """A reader of the chain, a write into what the chain reads, and whoever reads that, in front of the branch."""

    def block(x, router, gate_up, down, gate, state):
        weights, ids = torch.ops.moepdl.route(torch.mm(x, router), *ROUTE)
        y = torch.ops.moepdl.experts(x, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS)
        reader = y * 3
        torch.ops.aten.copy_.default(router, state)
        seen = router * 2
        return reader + torch.mm(x, gate), seen

    with FakeTensorMode():
        shapes = [(4, H), (H, E), (E, 2 * I, H), (E, H, I), (H, H), (H, E)]
        module = make_fx(block)(*[torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes])
    run_passes(module, (expand_stages, join_router, chain_pdl, lower), context())
    names = [op_name(node) for node in module.graph.nodes if node.op == "call_function"]
    assert names == ["chain_start", "mm", "chain_wait", "getitem", "mul", "copy_", "mul", "add"]


def test_one_branch_is_given_to_one_chain(hopper):
    """Two blocks side by side and one matmul beside both."""

    def block(x, router, gate_up, down, gate):
        found = []
        for _ in range(2):
            weights, ids = torch.ops.moepdl.route(torch.mm(x, router), *ROUTE)
            found.append(torch.ops.moepdl.experts(x, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS))
        return found[0] + found[1] + torch.mm(x, gate)

    with FakeTensorMode():
        shapes = [(4, H), (H, E), (E, 2 * I, H), (E, H, I), (H, H)]
        module = make_fx(block)(*[torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes])
    phase(module, overlap="on")
    assert sorted(calls(module)) == ["chain", "chain_start", "chain_wait"]


# When


def test_nothing_is_said_of_a_stream_when_lower_is_disabled(hopper):
    ctx = phase(layers(), disable=["lower"])
    (branch,) = ctx.report.dags[0].branches
    assert branch.why == 'lower is disabled by options["disable"]' and "second stream:" not in str(ctx.report)


def test_off_is_one_stream_on_is_two_for_any_number_of_tokens(hopper):
    for value, expected in (("off", ["chain"]), ("on", ["chain_start", "chain_wait"])):
        module = layers(tokens=3000)
        (branch,) = phase(module, overlap=value).report.dags[0].branches
        assert calls(module) == expected
        assert branch.why == f'options["overlap"] is "{value}"' and branch.overlapped == (value == "on")
        assert branch.limit is None


def test_many_tokens_keep_one_stream(hopper):
    module = layers(tokens=FEW_ROWS + 1)
    (branch,) = phase(module).report.dags[0].branches
    assert calls(module) == ["chain"] and branch.gain_us < 0
    assert branch.why == f"nothing is predicted to be gained at T={FEW_ROWS + 1}"


def dynamic_layer():
    """A layer for any number of tokens."""
    static = layers()
    _, *shapes = [tuple(node.meta["val"].shape) for node in static.graph.find_nodes(op="placeholder")]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    (tokens,) = mode.from_tensor(torch.empty(5, device="meta"), symbolic_context=dynamic).shape
    with mode:
        made = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in [(tokens, H), *shapes]]
        return make_fx(torch.fx.Interpreter(static).run, tracing_mode="symbolic")(*made)


def test_with_any_number_of_tokens_the_limit_is_the_largest_that_gains(hopper):
    module = dynamic_layer()
    ctx = phase(module)
    (branch,) = ctx.report.dags[0].branches
    assert branch.limit == FEW_ROWS == branch.at_tokens and branch.gain_us > 0
    start = next(node for node in module.graph.nodes if op_name(node) == "chain_start")
    assert start.args[2:] == (FEW_ROWS, True)
    (chain,) = ctx.report.schedule
    streams = [(variant.max_tokens, {launch.stream for launch in variant.launches}) for variant in chain.variants]
    assert streams == [(1, {1}), (2048, {0}), (None, {0})], "only what always has a second stream is drawn on it"


@pytest.mark.parametrize("table", [None, replace(TABLE, kernels={})])
def test_without_a_prediction_there_is_one_stream(hopper, monkeypatch, table):
    monkeypatch.setattr(device, "cost_model", lambda kind: table)
    module = layers()
    (branch,) = phase(module).report.dags[0].branches
    assert calls(module) == ["chain"] and branch.why.endswith("so no gain is predicted")


@pytest.mark.parametrize(
    ("what", "where"),
    covering(["another device", "an operator that says so", "a graph of its own"], ["anywhere", "in front", "behind"]),
)
def test_where_inductor_may_cut_beside_the_chain_there_is_one_stream(hopper, what, where):
    module, ctx = layers(), context(overlap="on")
    run_passes(module, (expand_stages,), ctx)
    anchor = next(node for node in module.graph.nodes if op_name(node) == ("add" if where == "behind" else "mul"))
    with module.graph.inserting_after(anchor):
        if what == "another device":
            cut = insert(anchor, torch.ops.aten._to_copy.default, (anchor,), {"device": torch.device("cpu")})
        elif what == "an operator that says so":
            cut = insert(anchor, torch.ops.aten.neg.default, (anchor,))
            cut.target = _unsafe()
        else:
            cut = module.graph.call_function(torch.ops.higher_order.cond, (anchor,))
            cut.meta["val"] = anchor.meta["val"]
    if where == "in front":
        anchor.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut and op_name(user) != "mm")
    run_passes(module, (chain_pdl,), ctx)
    (branch,) = ctx.report.dags[0].branches
    assert branch.overlapped == (where != "anywhere")
    if where == "anywhere":
        assert branch.why.startswith(f"a CUDA graph may end at {cut.name}, which ")


def _unsafe():
    library = torch.library.Library("moepdl_test_beside", "FRAGMENT")
    if not hasattr(torch.ops.moepdl_test_beside, "unsafe"):
        library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    return torch.ops.moepdl_test_beside.unsafe.default


def test_what_reads_the_ids_is_no_branch(hopper):
    def block(x, router, gate_up, down, square):
        weights, ids = torch.ops.moepdl.route(torch.mm(x, router), *ROUTE)
        y = torch.ops.moepdl.experts(x, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS)
        return y + torch.mm(weights, square)

    with FakeTensorMode():
        shapes = [(4, H), (H, E), (E, 2 * I, H), (E, H, I), (K, H)]
        module = make_fx(block)(*[torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes])
    assert phase(module, overlap="on").report.dags[0].branches == ()
    assert calls(module) == ["chain"]


# What must hold


def lowered():
    """A module with a start and a wait, and the two nodes."""
    module = layers()
    phase(module, overlap="on")
    named = {op_name(node): node for node in module.graph.nodes}
    return module, named["chain_start"], named["chain_wait"]


def test_a_write_into_what_the_chain_reads_is_refused(hopper):
    module, start, wait = lowered()
    assert check_flights(module.graph) is None
    operand = start.args[0][0]
    with module.graph.inserting_before(wait):
        insert(start, torch.ops.aten.zero_.default, (operand,))
    fault, node = check_flights(module.graph)
    assert fault == f"it writes into {operand.name}, which {start.name} reads on a second stream"
    assert op_name(node) == "zero_"


def test_a_write_through_a_view_is_refused_and_one_behind_the_wait_is_not(hopper):
    module, start, wait = lowered()
    with module.graph.inserting_after(wait):
        view = insert(start, torch.ops.aten.view.default, (start.args[0][0], [-1]))
    view.append(written := insert(start, torch.ops.aten.zero_.default, (view,)))
    assert check_flights(module.graph) is None
    start.append(view)
    view.append(written)
    assert check_flights(module.graph)[1] is written


def test_a_start_has_one_wait_on_the_same_operands(hopper):
    module, start, wait = lowered()
    with module.graph.inserting_after(wait):
        again = insert(wait, wait.target, wait.args)
    assert "has one wait" in check_flights(module.graph)[0]
    module.graph.erase_node(again)
    kept, wait.args = wait.args, (start, list(wait.args[1][1:]), *wait.args[2:])
    assert "other operands" in check_flights(module.graph)[0]
    wait.args = kept
    assert check_flights(module.graph) is None
    start.args, wait.args = start.args, (wait.args[2][0], *kept[1:])
    assert "has one wait" in check_flights(module.graph)[0], "nobody waits for it now"


def test_a_pass_that_breaks_it_is_named(hopper):
    def clobber(graph, ctx):
        wait = next(node for node in graph.nodes if op_name(node) == "chain_wait")
        with graph.inserting_before(wait):
            insert(wait, torch.ops.aten.zero_.default, (wait.args[1][0],))
        return 1

    module, *_ = lowered()
    with pytest.raises(PassError, match=r"clobber.*which chain_start_default reads on a second stream"):
        run_passes(module, (GraphPass("clobber", Level.LAUNCHES, "exact", clobber, ""),), context())


def test_a_chain_behind_a_fork_is_held_to_the_rules(hopper, monkeypatch):
    module = layers()
    ctx = context()
    run_passes(module, (expand_stages, chain_pdl), ctx)
    (chain,) = ctx.chains
    assert chain.beside is not None and chain.beside.limit == 4
    check_chain(chain, ctx.options)
    from moe_compiler import verify

    with pytest.raises(VerifyError, match="the first launch"):
        check_chain(with_pdl(chain, {v.name: frozenset({0}) for v in chain.program.variants}), ctx.options)
    # A kernel that spins and lets dependents start would keep the other stream from the device.
    monkeypatch.setattr(
        verify,
        "grids",
        lambda chain, variant: [verify.Grid("first"), verify.Grid("spin", spins=True, trigger=Trigger.AFTER_WAIT)],
    )
    with pytest.raises(VerifyError, match=r"R12 progress: launch 1 \(spin\)"):
        check_chain(chain, ctx.options)


# Right numbers


def graphs_differ(function, shapes, seed):
    """The largest difference between a function of canonical operators and its graph after the passes, overlap on."""
    torch.manual_seed(seed)
    tensors = [torch.randn(s) * 0.3 for s in shapes]
    with FakeTensorMode():
        module = make_fx(function)(*[torch.empty(s) for s in shapes])
    expected = module(*tensors)
    phase(module, overlap="on", disable=["inline_few"])
    found = module(*tensors)
    assert check_flights(module.graph) is None
    return calls(module), max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("seed", one_in(3, range(16)))
def test_random_graphs_of_blocks_and_branches_keep_their_values(seed):
    """Blocks and matmuls that read whatever was there before, in any order: chains beside each other and branches that
    are shared, that feed a later block, or that meet nothing."""
    chance = random.Random(seed)
    plan = [
        (chance.choice(["block", "mm", "mm", "add", "mul", "write"]), chance.random(), chance.random())
        for _ in range(chance.randint(6, 18))
    ]

    def function(x, state, router, gate_up, down, square):
        values = [x]
        for what, one, two in plan:
            a, b = (values[-1 - int(place**3 * len(values))] for place in (one, two))
            if what == "block":
                weights, ids = torch.ops.moepdl.route(torch.mm(a, router), *ROUTE[:-1], torch.float32)
                arguments = ([gate_up], [], [down], [], [], [], *EXPERTS[:-1], torch.float32)
                values.append(torch.tanh(torch.ops.moepdl.experts(a, ids, weights, *arguments)))
            elif what == "mm":
                values.append(torch.mm(a, square))
            elif what == "write":
                torch.ops.aten.copy_.default(state, b)
                values.append(state * 0.5)
            else:
                values.append(torch.add(a, b) if what == "add" else a * 0.5)
        return values[-3:]

    shapes = [(5, H), (5, H), (H, E), (E, 2 * I, H), (E, H, I), (H, H)]
    _, difference = graphs_differ(function, shapes, seed)
    assert difference < 1e-5


def test_the_random_graphs_have_chains_beside_branches():
    module_calls, difference = graphs_differ(
        lambda x, router, gate_up, down, gate, up, own: [layers_of(x, router, gate_up, down, gate, up, own)],
        [(5, H), (H, E), (E, 2 * I, H), (E, H, I), (H, S), (H, S), (S, H)],
        0,
    )
    assert module_calls == ["chain_start", "chain_wait"] and difference < 1e-5


def layers_of(x, router, gate_up, down, gate, up, own):
    weights, ids = torch.ops.moepdl.route(torch.mm(x, router), *ROUTE[:-1], torch.float32)
    y = torch.ops.moepdl.experts(x, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS[:-1], torch.float32)
    return y + torch.mm(torch.sigmoid(torch.mm(x, gate)) * torch.mm(x, up), own)


ON = {"overlap": "on", "disable": ["inline_few"], "require_match": True}


def compare(model, compiled, x):
    """Value and gradients of a model and of what was compiled of it."""
    found = []
    for each in (compiled, model):
        own = x.clone().requires_grad_()
        y = each(own)
        y.square().sum().backward()
        found.append([y.detach(), own.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("remainder", "gated"),
    [
        ("eager", True),
        ("eager", False),
        pytest.param("inductor", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_training_is_right_and_both_directions_overlap(remainder, gated):
    model = shared_expert.model(gated=gated)
    compiled = torch.compile(model, backend="moepdl", options={**ON, "remainder": remainder})
    compare(model, compiled, torch.randn(1, 9, 32))
    found = {dag.direction: dag.branches for dag in last_reports()[-1].dags}
    assert set(found) == {"forward", "backward"}
    assert all(len(branches) == 2 and all(b.overlapped for b in branches) for branches in found.values())


@pytest.mark.parametrize("remainder", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inference_with_any_number_of_tokens_is_right(remainder):
    model = shared_expert.model()
    compiled = torch.compile(model, backend="moepdl", dynamic=True, options={**ON, "remainder": remainder})
    with torch.no_grad():
        for tokens in (2, 37, 1, 0, 300):
            x = torch.randn(1, tokens, 32)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_every_pass_is_compared_numerically():
    model = shared_expert.model()
    compiled = torch.compile(model, backend="moepdl", options={**ON, "verify": "numeric", "remainder": "eager"})
    compare(model, compiled, torch.randn(1, 9, 32))


# What Inductor makes of it


def generated(model, x, **options) -> list[str]:
    """The lines of the generated wrapper, program texts left out."""
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(model, backend="moepdl", options={**ON, **options})
    with torch.no_grad():
        found, (code, *_) = run_and_get_code(compiled, x)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
    body = code[code.index("def call(") :]
    return [re.sub(r"'\{.*\}'", "'P'", line.strip()) for line in body[: body.index("def get_args")].splitlines()]


def flights(lines) -> list[tuple[int, int, set[str]]]:
    """For each start: its line, its wait's line, and the buffers that the chain reads."""
    found = []
    for index, line in enumerate(lines):
        if "= torch.ops.moepdl.chain_start" in line:
            wait = next(i for i in range(index, len(lines)) if "= torch.ops.moepdl.chain_wait" in lines[i])
            found.append((index, wait, set(re.findall(r"\b(?:buf|arg)\d+(?:_\d+)?\b", line.partition("(")[2]))))
    return found


def taken_early(lines) -> list[str]:
    """Lines between a start and its wait that free, reuse or write what the chain reads."""
    found = []
    for start, wait, names in flights(lines):
        for line in lines[start + 1 : wait]:
            freed = set(re.findall(r"\bdel (\w+)", line)) | set(re.findall(r"\bout=(\w+)", line))
            found += [line] if freed & names else []
    return found


@pytest.mark.parametrize("gated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_generated_code_keeps_the_order_and_the_lifetimes(gated):
    lines = generated(shared_expert.model(3, gated), torch.randn(1, 37, 32))
    spans = flights(lines)
    assert len(spans) == 3
    kind = re.compile(r"extern_kernels\.(mm|addmm)|cpp_fused|= torch.ops.moepdl\.chain_(start|wait)")
    order = [re.sub(r"^.*chain_", "", found[0]) for line in lines if (found := kind.search(line))]
    inside = ["start", *["extern_kernels.mm"] * (3 if gated else 2), "cpp_fused", "extern_kernels.mm", "wait"]
    places = [index for index, what in enumerate(order) if what == "start"]
    assert [order[place : place + len(inside)] for place in places] == [inside] * 3
    assert taken_early(lines) == []
    for start, wait, names in spans:
        assert names and names <= set(re.findall(r"\w+", lines[wait])), "the wait is given all that the start was"
        assert not any("chain_wait" in line for line in lines[start:wait])


def test_without_the_operands_at_the_wait_the_lifetimes_would_be_wrong(monkeypatch, cold_cache):
    """What the test above would see: Inductor then frees what the chain still reads."""
    from moe_compiler import pipeline
    from moe_compiler.passes import lower as module

    def careless(like, target, args, kwargs=None):
        if target is torch.ops.moepdl.chain_wait.default:
            shape = list(args[1][0].meta["val"].shape)
            zeros = insert(like, torch.ops.aten.full.default, (shape, 0.0), {"dtype": torch.float32})
            args = (args[0], [zeros, *args[1][1:]], *args[2:])
        return insert(like, target, args, kwargs)

    monkeypatch.setattr(module, "insert", careless)
    monkeypatch.setattr(pipeline, "check_graph", lambda *_: None)
    lines = generated(shared_expert.model(3), torch.randn(1, 37, 32))
    assert len(taken_early(lines)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["topological_sort_lpmf", "topological_sort_bfs", "topological_sort_dfs"])
def test_no_order_of_inductors_moves_a_wait_before_the_branch(method, monkeypatch, cold_cache):
    """Inductor takes another order where that needs less memory. The wait reads the branch, so it stays behind it."""
    memory = pytest.importorskip("torch._inductor.memory")

    def forced(nodes, buffers, fused, inputs, outputs, *_):
        _, freeable = memory.prepare_planning_info(nodes, buffers, fused, inputs, outputs)
        sort = getattr(memory, method)
        return sort(nodes, freeable, buffers, outputs) if method.endswith("lpmf") else sort(nodes)

    monkeypatch.setattr(memory, "reorder_for_peak_memory", forced)
    lines = generated(shared_expert.model(3), torch.randn(1, 37, 32))
    assert taken_early(lines) == []
    for start, wait, _ in flights(lines):
        (last,) = [
            i
            for i in range(len(lines))
            if re.search(r"extern_kernels.mm\(reinterpret_tensor\(buf\d+, \(37, 24\)", lines[i]) and start < i < wait
        ]
        assert last < wait

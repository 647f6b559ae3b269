"""Every way to hand a model to the backend, and several of them at once in one process."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch

from moe_compiler.backend import explain, last_reports, moepdl
from moe_compiler.report import Report
from moe_compiler.testing import examples
from tests.fast_part import covering
from tests.moe_compiler.blocks import qwen3_block, qwen3_decoder

EAGER = {"remainder": "eager"}


def new_reports(before: list[Report]) -> list[Report]:
    return [report for report in last_reports() if not any(report is old for old in before)]


def test_one_model_compiled_with_different_options_keeps_them_apart():
    block = qwen3_block()
    x = torch.randn(1, 70, 32)
    settings = [{}, {"disable": ["raise_moe"]}, {"pdl": "off"}, {"dryrun": True}, {"disable": ["chain_pdl"]}]
    compiled = [torch.compile(block, backend=moepdl, options={**EAGER, **options}) for options in settings]
    before = last_reports()
    with torch.no_grad():
        for ours in [*compiled, *reversed(compiled)]:
            torch.testing.assert_close(ours(x), block(x))
    reports = new_reports(before)
    assert len(reports) == len(settings)
    for report, options in zip(reports, settings, strict=True):
        assert {key: report.options[key] for key in options} == options
        assert {key for key, origin in report.origins.items() if origin != "default"} == {"remainder", *options}
    assert [report.status for report in reports] == ["rewritten", "unchanged", "rewritten", "dryrun", "rewritten"]
    assert [len(report.schedule) for report in reports] == [1, 0, 1, 1, 0]


def test_the_same_options_again_do_not_compile_again():
    block = qwen3_block()
    x = torch.randn(1, 9, 32)
    before = last_reports()
    with torch.no_grad():
        for _ in range(3):
            torch.compile(block, backend=moepdl, options={"remainder": "eager", "disable": ["chain_pdl"]})(x)
    assert len(new_reports(before)) == 1


def test_the_options_of_one_compile_do_not_reach_the_backward_of_another():
    """The backward graphs are compiled late, after both forward graphs."""
    blocks = [qwen3_block(), qwen3_block()]
    settings = [EAGER, {**EAGER, "disable": ["chain_pdl"]}]
    x = torch.randn(1, 70, 32, requires_grad=True)
    before = last_reports()
    outs = [torch.compile(b, backend=moepdl, options=o)(x) for b, o in zip(blocks, settings, strict=True)]
    for block, out in zip(reversed(blocks), reversed(outs), strict=True):
        (mine,) = torch.autograd.grad(out.sum(), x)
        (theirs,) = torch.autograd.grad(block(x).sum(), x)
        torch.testing.assert_close(mine, theirs)
    first, second = new_reports(before)
    assert [chain.direction for chain in first.schedule] == ["forward", "backward"] and not second.schedule
    assert {record.phase for record in second.passes} == {"capture", "forward", "backward"}


def test_a_module_that_compiles_itself():
    block = qwen3_block()
    x = torch.randn(1, 9, 32)
    wanted = block(x)
    before = last_reports()
    block.compile(backend=moepdl, options={**EAGER, "require_match": True})
    torch.testing.assert_close(block(x), wanted)
    assert [len(report.matches) for report in new_reports(before)] == [1]


def test_only_the_layers_are_compiled_and_equal_layers_once():
    model = qwen3_decoder(layers=3).train()
    tokens = torch.randint(0, 128, (2, 12))
    wanted = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    before = last_reports()
    for layer in model.model.layers:
        layer.compile(backend=moepdl, options={**EAGER, "require_match": True}, dynamic=False)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    torch.testing.assert_close(loss, wanted)
    parameters = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, parameters))
    assert [len(report.matches) for report in new_reports(before)] == [1]


def test_equal_layers_share_one_chain_program():
    from moe_compiler.runtime_kernels.chain.prepared import prepare

    model = qwen3_decoder(layers=4)
    prepare.cache_clear()
    with torch.no_grad():
        torch.compile(model, backend=moepdl, options=EAGER)(input_ids=torch.randint(0, 128, (1, 70)), use_cache=False)
    report = last_reports()[-1]
    assert len(report.schedule) == 4 and len(report.folded_schedule()) == 1
    assert prepare.cache_info().currsize == 1


@pytest.mark.parametrize("how", ["dynamic", "marked", "static"])
def test_sizes_that_change(how):
    block = qwen3_block()
    ours = torch.compile(
        block,
        backend=moepdl,
        options={**EAGER, "require_match": True},
        dynamic={"dynamic": True, "static": False, "marked": None}[how],
    )
    before = last_reports()
    with torch.no_grad():
        for tokens in (9, 33, 70):
            x = torch.randn(1, tokens, 32)
            if how == "marked":
                torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(ours(x), block(x))
    found = [report.matches[0].sizes["T"] for report in new_reports(before)]
    assert found == ["9", "33", "70"] if how == "static" else len(found) == 1 and not found[0].isdigit()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("entry", ["compile", "wrapper"])
def test_copies_of_a_compiled_model_compute_with_their_own_weights(how, entry):
    block = qwen3_block()
    x = torch.randn(1, 9, 32)
    if entry == "compile":
        block.compile(backend="moepdl", options=EAGER)
        ours = block
    else:
        ours = torch.compile(block, backend="moepdl", options=EAGER)
    with torch.no_grad():
        wanted = ours(x)
        if how == "deepcopy":
            again = copy.deepcopy(ours)
        elif how == "pickle":
            again = pickle.loads(pickle.dumps(ours))
        else:
            file = io.BytesIO()
            torch.save(ours, file)
            file.seek(0)
            again = torch.load(file, weights_only=False)
        torch.testing.assert_close(again(x), wanted)
        for parameter in block.parameters():
            parameter.zero_()
        torch.testing.assert_close(again(x), wanted)
        assert not ours(x).any()


def test_threads_that_compile_at_once_get_their_own_reports():
    torch.compile(qwen3_block(), backend=moepdl, options=EAGER)(torch.randn(1, 3, 32))
    torch._dynamo.reset()
    names = ("gather_einsum", "batched_mm", "dense_bmm")
    found: dict[str, object] = {}
    start = threading.Barrier(len(names))

    def work(name: str) -> None:
        try:
            start.wait(timeout=60)
            example = examples()[name](torch.float32)
            inputs = example.inputs(11)
            report = explain(example.module, *inputs)
            ours = torch.compile(example.module, backend=moepdl, options={**EAGER, "require_match": True})
            with torch.no_grad():
                torch.testing.assert_close(ours(*inputs), example.module(*inputs))
            found[name] = [match.formulation for match in report.matches]
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == {name: [name] for name in names}


def test_explain_after_more_reports_than_are_kept():
    from moe_compiler import backend

    block = qwen3_block()
    for _ in range(backend._REPORTS.maxlen + 3):
        backend._REPORTS.append(Report(frame="old", status="unchanged"))
    assert len(explain(block, torch.randn(1, 9, 32)).matches) == 1


@pytest.mark.parametrize(("implementation", "decomposed"), covering(["grouped_mm", "batched_mm"], [False, True]))
def test_an_exported_program_with_symbolic_tokens(implementation, decomposed):
    block = qwen3_block(implementation=implementation).eval()
    sizes = {"hidden_states": {1: torch.export.Dim("tokens", min=2, max=4096)}}
    program = torch.export.export(block, (torch.randn(1, 9, 32),), dynamic_shapes=sizes)
    if decomposed:
        program = program.run_decompositions()
    module = program.module()
    ours = torch.compile(module, backend=moepdl, options={**EAGER, "require_match": True}, dynamic=True)
    before = last_reports()
    for tokens in (9, 2, 70):
        x = torch.randn(1, tokens, 32, requires_grad=True)
        out, eager = ours(x), block(x)
        torch.testing.assert_close(out, eager)
        (mine,), (theirs,) = (torch.autograd.grad(y.square().sum(), x) for y in (out, eager))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    reports = new_reports(before)
    assert [len(report.matches) for report in reports] == [1]
    assert not reports[0].matches[0].sizes["T"].isdigit()


@pytest.mark.parametrize(
    ("name", "decomposed"), covering(["gather_einsum", "dense_bmm", "one_hot_loop", "where_loop"], [False, True])
)
def test_exported_programs_of_the_other_formulations(name, decomposed):
    example = examples()[name](torch.float32, experts=4)
    (x,) = example.inputs(9)
    program = torch.export.export(
        example.module, (x,), dynamic_shapes=[{0: torch.export.Dim("tokens", min=2, max=4096)}]
    )
    if decomposed:
        program = program.run_decompositions()
    options = {**EAGER, "require_match": True}
    ours = torch.compile(program.module(), backend=moepdl, options=options, dynamic=True, fullgraph=True)
    before = last_reports()
    with torch.no_grad():
        for tokens in (9, 40):
            (x,) = example.inputs(tokens)
            torch.testing.assert_close(ours(x), example.module(x))
    assert [match.formulation for report in new_reports(before) for match in report.matches] == [name]

"""The dump folder: its files, byte stability, reading it back; graph files that rebuild the graph they show."""

from __future__ import annotations

import dataclasses
import importlib
import json
import operator
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from moe_compiler.capture import capture
from moe_compiler.dump import (
    find_frames,
    graph_files,
    load_graph,
    load_report,
    pass_diffs,
    passes_text,
    render_graph,
    render_repro,
    write_dump,
)
from moe_compiler.errors import MoepdlError
from moe_compiler.graph_file import example_inputs
from moe_compiler.moe_ir import user_line
from moe_compiler.report import GraphRecord, Report

FILES = {
    "00_captured.py",
    "01_raise_moe.py",
    "02_forward_expand_stages.py",
    "03_forward_lower.py",
    "passes.txt",
    "timings.json",
    "matches.json",
    "schedule.json",
    "dag.dot",
    "dag.txt",
    "timeline.json",
    "report.html",
    "report.txt",
    "report.json",
}


class Routed(torch.nn.Module):
    """A checkpointed body, symbolic sizes, a constant, views: what a graph file has to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 16, 8))
        self.router = torch.nn.Linear(16, 4)

    def inner(self, x, ids, weights):
        every = torch.einsum("th,khi->tki", x, self.weight)
        return (every.gather(1, ids.unsqueeze(-1).expand(-1, -1, 8)) * weights.unsqueeze(-1)).sum(1)

    def forward(self, x):
        masked = self.router(x).masked_fill(torch.tensor([False, True, False, False]), float("-inf"))
        weights, ids = torch.topk(F.softmax(masked, -1, dtype=torch.float32), 2)
        y = checkpoint(self.inner, x, ids, weights, use_reentrant=False)
        return y[:, ::2] + x.new_zeros(x.shape[0] * 2 + 1).sum() * float(x.shape[0])


@pytest.fixture(scope="module")
def captured() -> GraphModule:
    """The captured graph of `Routed` with a symbolic number of tokens, 37 in the traced run."""
    found: list[GraphModule] = []

    def backend(module, inputs):
        found.append(capture(module, inputs))
        return module

    torch.compile(Routed(), backend=backend, dynamic=True)(torch.randn(37, 16))
    torch._dynamo.reset()
    return found[0]


def nodes(module: GraphModule) -> list[tuple[str, str, str]]:
    return [(node.op, node.name, str(node.target)) for node in module.graph.nodes]


def test_a_graph_file_rebuilds_its_graph(captured, tmp_path):
    text = render_graph(captured, "captured", "frame 0/0")
    path = tmp_path / "00_captured.py"
    path.write_text(text)
    again = load_graph(path)
    assert nodes(again) == nodes(captured)
    assert render_graph(again, "captured", "frame 0/0") == text
    for old, new in zip(captured.graph.nodes, again.graph.nodes, strict=True):
        if old.op == "call_function":
            assert user_line(new) == user_line(old)
            assert str(new.meta.get("val")) == str(old.meta.get("val"))


def test_a_graph_file_shows_lines_sizes_and_operators(captured):
    text = render_graph(captured, "captured", "frame 0/0")
    assert text.startswith('"""captured\n\nframe 0/0\n"""\n')
    assert " = g.size('s77', 37)" in text
    assert "torch.ops.aten.topk.default" in text
    assert "operator.getitem" in text
    assert "val=g.expr('2*s77 + 1')" in text
    assert "test_dump.py" in text
    assert "torch.ops.higher_order.tag_activation_checkpoint" in text
    assert "def body_1(parent: GraphFile)" in text
    assert 'float("-inf")' in text


def test_views_share_their_bases_storage(captured, tmp_path):
    path = tmp_path / "g.py"
    path.write_text(render_graph(captured, "t"))
    by_name = {node.name: node.meta.get("val") for node in load_graph(path).graph.nodes}
    view = next(value for name, value in by_name.items() if name.startswith("slice_2"))
    base = next(value for name, value in by_name.items() if name.startswith("slice_1"))
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata


def test_a_graph_file_runs(captured, tmp_path):
    path = tmp_path / "g.py"
    path.write_text(render_graph(captured, "t"))
    module = load_graph(path)
    inputs = example_inputs(module)
    assert [tuple(getattr(value, "shape", (value,))) for value in inputs] == [
        (4, 16),
        (4,),
        (37,),
        (37, 16),
        (4, 16, 8),
    ]
    (result,) = module(*inputs)
    assert result.shape == (37, 4)
    (expected,) = captured(*inputs)
    torch.testing.assert_close(result, expected)


def test_a_graph_file_is_a_program(captured, tmp_path):
    path = tmp_path / "g.py"
    path.write_text(render_graph(captured, "t"))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert "torch.ops.aten.topk.default" in done.stdout


def test_repro_holds_options_without_the_dump(captured):
    text = render_repro(captured, "repro", "why", {"pdl": "off", "dump": "/tmp/d"})
    assert "OPTIONS = {'pdl': 'off'}" in text
    assert "backend=moepdl, options=OPTIONS" in text
    compile(text, "repro.py", "exec")


def by_hand() -> GraphModule:
    """Names that collide with what a file uses, odd arguments, a constant and a large attribute."""
    root = torch.nn.Module()
    root.register_buffer("small", torch.tensor([1.0, float("inf")]))
    root.register_buffer("large", torch.zeros(100, 3))
    graph = torch.fx.Graph()
    x = graph.placeholder("torch_1")
    x.name = "torch"
    small = graph.get_attr("small")
    graph.get_attr("large")
    clamp = graph.call_function(torch.ops.aten.clamp.default, (x, float("-inf")), {"max": float("inf")})
    added = graph.call_function(torch.ops.aten.add.Tensor, (clamp, small))
    graph.call_function(torch.ops.aten.to.device, (added, torch.device("cpu"), torch.float32))
    graph.call_function(operator.getitem, (added, (slice(None, 1, None), Ellipsis, None)))
    graph.output((added, None))
    return GraphModule(root, graph)


def test_names_and_arguments_that_need_care(tmp_path):
    module = by_hand()
    text = render_graph(module, 'a """title""" \\ with quotes"')
    path = tmp_path / "g.py"
    path.write_text(text)
    again = load_graph(path)
    assert [node.name for node in again.graph.nodes] == [node.name for node in module.graph.nodes]
    assert render_graph(again, 'a """title""" \\ with quotes"') == text
    assert "torch_node = g.placeholder('torch'" in text
    torch.testing.assert_close(again.small, module.small)
    assert again.large.shape == (100, 3)


def test_operators_of_other_libraries_bring_their_import(tmp_path, monkeypatch):
    (tmp_path / "other_library.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('otherlib::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("other_library")
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.otherlib.twice.default, (graph.placeholder("x"),)))
    text = render_graph(GraphModule(torch.nn.Module(), graph), "t")
    assert "\nimport other_library\n" in text
    (tmp_path / "g.py").write_text(text)
    assert load_graph(tmp_path / "g.py")(torch.ones(2)).tolist() == [2.0, 2.0]


def test_what_has_no_spelling_is_named_when_loaded(tmp_path):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(lambda value: value, (x,)))
    path = tmp_path / "g.py"
    path.write_text(render_graph(GraphModule(torch.nn.Module(), graph), "t"))
    with pytest.raises(MoepdlError, match=r"holds an object that cannot be rebuilt: .*<lambda>"):
        load_graph(path)


def test_load_graph_refuses_what_is_no_graph_file(tmp_path):
    with pytest.raises(MoepdlError, match="there is no graph file"):
        load_graph(tmp_path / "absent.py")
    (tmp_path / "plain.py").write_text("x = 1\n")
    with pytest.raises(MoepdlError, match="has no function graph"):
        load_graph(tmp_path / "plain.py")
    (tmp_path / "broken.py").write_text("def graph():\n    return 1 / 0\n")
    with pytest.raises(MoepdlError, match="does not rebuild its graph: ZeroDivisionError"):
        load_graph(tmp_path / "broken.py")


def test_the_files_of_a_dump(samples, tmp_path):
    report = samples.sample()
    report.repro = "print('repro')\n"
    frame = write_dump(report, tmp_path)
    assert frame == tmp_path / "rank0" / "0_0"
    assert {path.name for path in frame.iterdir()} == FILES | {"repro.py"}
    assert report.dump_folder == str(frame)
    matches = json.loads((frame / "matches.json").read_text())
    assert len(matches["matches"]) == 32
    assert matches["misses"][0]["step"] == "combine"
    schedule = json.loads((frame / "schedule.json").read_text())
    assert schedule["chains"][0]["variants"][0]["edges"][0]["programmatic"] is True
    assert json.loads((frame / "timeline.json").read_text())["traceEvents"]
    assert (frame / "dag.dot").read_text().startswith("digraph moepdl {")
    assert (frame / "03_forward_lower.py").read_text() == "x = 2\n"


def test_a_dump_is_byte_stable_whatever_the_time_and_the_folder(samples, tmp_path):
    one, two = samples.sample(), samples.sample()
    two.passes = [dataclasses.replace(item, seconds=item.seconds + 1) for item in two.passes]
    two.options["dump"] = "/elsewhere"
    first, second = write_dump(one, tmp_path / "a"), write_dump(two, tmp_path / "b")
    for name in FILES - {"timings.json"}:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
        assert str(tmp_path) not in (first / name).read_text()
    assert (first / "timings.json").read_bytes() != (second / "timings.json").read_bytes()


def test_a_report_is_read_back_with_its_times(samples, tmp_path):
    report = samples.sample()
    frame = write_dump(report, tmp_path)
    again = load_report(frame)
    assert again.passes == report.passes
    assert again.dump_folder == str(frame)
    assert again == dataclasses.replace(report, options={**report.options, "dump": "."})
    assert "y = experts(x)" not in (frame / "report.json").read_text()


def test_a_second_dump_of_a_frame_replaces_the_first(samples, tmp_path):
    frame = write_dump(samples.sample(), tmp_path)
    report = samples.sample()
    report.graphs = report.graphs[:1]
    assert write_dump(report, tmp_path) == frame
    assert {path.name for path in frame.glob("[0-9]*.py")} == {"00_captured.py"}
    assert not list(frame.glob(".*"))


def test_numbers_run_through_the_phases():
    graphs = [
        GraphRecord(0, "captured", "capture", "a"),
        GraphRecord(0, "lower", "backward", "d"),
        GraphRecord(1, "raise_moe", "capture", "b"),
        GraphRecord(0, "expand_stages", "forward", "c"),
    ]
    assert graph_files(graphs) == {
        "00_captured.py": "a",
        "01_raise_moe.py": "b",
        "02_forward_expand_stages.py": "c",
        "03_backward_lower.py": "d",
    }


def test_rank_and_frame_name_the_folder(samples, tmp_path, monkeypatch):
    assert write_dump(samples.nothing(), tmp_path, rank=3) == tmp_path / "rank3" / "1_0"
    monkeypatch.setenv("RANK", "5")
    assert write_dump(samples.nothing(), tmp_path) == tmp_path / "rank5" / "1_0"


def test_find_frames_in_order(samples, tmp_path):
    for frame in ("10/0", "2/0", "0/0"):
        write_dump(Report(frame, "unchanged"), tmp_path)
    assert [path.name for path in find_frames(tmp_path)] == ["0_0", "2_0", "10_0"]
    assert [path.name for path in find_frames(tmp_path / "rank0" / "2_0")] == ["2_0"]
    with pytest.raises(MoepdlError, match="holds no dump"):
        find_frames(tmp_path / "nothing")


def test_diffs_are_within_a_phase(samples, tmp_path):
    frame = write_dump(samples.sample(), tmp_path)
    diffs = dict(pass_diffs(frame))
    assert list(diffs) == ["01_raise_moe.py", "03_forward_lower.py"]
    assert diffs["03_forward_lower.py"] == (
        "--- 02_forward_expand_stages.py\n+++ 03_forward_lower.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
    )
    assert [name for name, _ in pass_diffs(frame, "lower")] == ["03_forward_lower.py"]
    with pytest.raises(MoepdlError, match="no pass 'rise_moe' changed") as caught:
        pass_diffs(frame, "rise_moe")
    assert caught.value.try_ == "raise_moe"


def test_the_pass_table(samples):
    lines = passes_text(samples.sample().passes).splitlines()
    assert lines[0].split() == ["phase", "pass", "level", "numerics", "rewrites", "operators"]
    assert lines[1].split() == ["capture", "canonicalize", "captured", "exact", "64", "aten.linear+32", "aten.t-64"]
    assert lines[2].split()[-1] == "-"
    assert passes_text(samples.sample().passes, times=True).splitlines()[1].split()[5] == "12.0"


def test_a_folder_that_cannot_be_written_is_our_error(samples, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MoepdlError, match=r"the dump folder .* cannot be written"):
        write_dump(samples.sample(), Path(tmp_path) / "file")


def test_a_broken_report_file_is_our_error(tmp_path):
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(MoepdlError, match="cannot be read"):
        load_report(tmp_path)

"""Graph breaks in the report: what broke, at which line, what helps; also those of frames without any graph."""

from __future__ import annotations

import pytest
import torch

from moe_compiler.backend import explain, last_reports, moepdl
from moe_compiler.fragments import fragment
from moe_compiler.report import FragmentRecord, Report
from tests.moe_compiler.uncapturable import BLOCKS, H


def reports_of(function, *inputs):
    known = {id(report) for report in last_reports()}
    with torch.no_grad():
        torch.compile(function, backend=moepdl, options={"remainder": "eager"})(*inputs)
    return [report for report in last_reports() if id(report) not in known]


def test_a_frame_that_was_skipped_has_a_report_although_no_graph_of_it_reached_the_backend():
    block = BLOCKS["RangeSkip"]().eval()
    reports = reports_of(block, torch.randn(1, 7, H))
    (skipped,) = [report for report in reports if any(not f.compiled for f in report.fragments)]
    (record,) = skipped.fragments
    assert record.function == "forward" and record.where.endswith("place, token = torch.where(mask[number])")
    assert "fullgraph=True" in record.remedy and "capture_dynamic_output_shape_ops" in record.remedy
    assert "moe_compiler.prepare(model)" in record.remedy
    # The pieces that did reach it (the router, single experts) are no block.
    assert all(report.status == "unchanged" and not report.matches for report in reports)
    text = str(skipped)
    assert "0 blocks matched, 1 graph break" in text and "runs in eager (in forward), no graph" in text


def test_a_graph_that_ends_early_and_what_goes_on_after_it_are_both_told():
    block = BLOCKS["HitLoop"]().eval()
    reports = reports_of(block, torch.randn(1, 7, H))
    broken = [f for report in reports for f in report.fragments if f.compiled]
    skipped = [f for report in reports for f in report.fragments if not f.compiled]
    (first,), (second,) = broken, skipped
    assert first.where.endswith(".nonzero()") and "depends on the data" in first.reason
    assert second.function.startswith("forward, from line ") and "capture_scalar_outputs" in second.remedy
    assert "uncapturable.py" in second.where and "/torch/" not in second.where


def test_a_frame_is_told_once():
    reports_of(BLOCKS["RangeSkip"]().eval(), torch.randn(1, 7, H))
    before = len(last_reports())
    assert len(last_reports()) == before


def test_explain_names_what_stands_in_the_way_of_one_graph_and_every_piece():
    block = BLOCKS["MoeInfer"]().eval()
    with torch.no_grad():
        report = explain(block, torch.randn(1, 7, H))
        known = len(last_reports())
    (obstacle,) = [note for note in report.notes if "does not make one graph" in note]
    assert "a branch depends on the data" in obstacle and "if count == 0:" in obstacle
    assert "moe_compiler.prepare(model)" in obstacle
    assert [f.compiled for f in report.fragments] == [True, False]
    assert not report.matches and "2 graph breaks" in report.summary()
    assert len(last_reports()) == known  # explain's own frames are no compile of the user's


def hit_experts(x):
    total = torch.zeros_like(x)
    for number in (x > 0).nonzero().flatten().unique().tolist():
        total = total + number * x
    return total


def split_by_counts(x):
    counts = torch.bincount((x > 0).long(), minlength=2).tolist()
    return torch.cat([part * 2 for part in x.split(counts)])


@pytest.mark.parametrize("function", [hit_experts, split_by_counts])
def test_explain_reports_a_size_that_torchs_own_code_asks_for(function):
    report = explain(function, torch.arange(-2.0, 3.0))
    (obstacle,) = [note for note in report.notes if "does not make one graph" in note]
    assert "test_fragments.py" in obstacle and ".tolist()" in obstacle and "moe_compiler.prepare(model)" in obstacle
    assert report.fragments and all("test_fragments.py" in f.where and f.remedy for f in report.fragments)


def test_what_a_backend_raises_is_no_break():
    before = last_reports()
    with pytest.raises(Exception, match="asks for 1"), torch.no_grad():
        torch.compile(torch.sin, backend=moepdl, options={"require_match": True})(torch.ones(3))
    after = [report for report in last_reports() if not any(report is old for old in before)]
    assert len(after) == 1 and not after[0].fragments


def test_explain_after_a_compile_that_gave_the_frame_up():
    block = BLOCKS["RangeSkip"]().eval()
    x = torch.randn(1, 7, H)
    reports_of(block, x)
    with torch.no_grad():
        report = explain(block, x)
    assert any("if token.shape[0] == 0:" in note for note in report.notes)


@pytest.mark.parametrize(
    ("reason", "meaning", "remedy"),
    [
        (
            "Dynamic shape operator\n  Explanation: Operator `aten.nonzero.default`'s",
            "the size of a result",
            "shape_ops",
        ),
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "a number is read", "scalar_outputs"),
        ("Data-dependent branching\n  Explanation: Detected", "a branch depends", "prepare"),
        ("Could not guard on data-dependent expression Eq(u0, 0)", "a branch depends", "prepare"),
        ("Call to `torch._dynamo.graph_break()`\n  Explanation: x", "", "take what it names out"),
    ],
)
def test_a_reason_has_a_meaning_and_a_remedy(reason, meaning, remedy):
    record = fragment(reason, f"{__file__}:1")
    assert record.reason.startswith(meaning or "Call to") and remedy in record.remedy
    assert record.where.startswith(f"{__file__}:1: ")


def test_fragments_survive_json_are_folded_and_shown():
    record = FragmentRecord("why <it> broke", "a.py:3: x", "do that", "forward", compiled=False)
    report = Report(frame="0/0", status="unchanged", fragments=[record, record])
    assert Report.from_dict(report.to_dict()).fragments == [record, record]
    assert [f.count for f in report.folded_fragments()] == [2]
    assert "runs in eager (in forward), no graph x2: why <it> broke\n    at a.py:3  x\n    try: do that" in str(report)
    html = report._repr_html_()
    assert "why &lt;it&gt; broke" in html and "do that" in html
    merged = Report.merge([report, Report(frame="1/0", status="unchanged")])
    assert len(merged.fragments) == 2
    older = {key: value for key, value in report.to_dict().items() if key != "fragments"}
    assert Report.from_dict(older).fragments == []


def test_code_that_fails_under_torch_compile_alone_is_told_with_its_error():
    """Switch makes up a mask in eager only: without one Dynamo sees None[...]."""

    def function(x, mask=None):
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones_like(x)
        return x * mask[:, None]

    with torch.no_grad():
        report = explain(function, torch.randn(3))
    (note,) = [note for note in report.notes if "does not make one graph" in note]
    assert "the model's own code raises while Dynamo runs through it" in note
    assert "'NoneType' object is not subscriptable" in note and "give the model the input" in note

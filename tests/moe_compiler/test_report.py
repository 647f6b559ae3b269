"""The Report: what it prints, how equal layers fold, that it survives JSON, and the formats it saves as."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from moe_compiler.errors import MoepdlError
from moe_compiler.report import (
    ChainRecord,
    DagRecord,
    MatchRecord,
    MissRecord,
    PassRecord,
    Report,
    VariantRecord,
    split_where,
)


def test_all_well_is_three_to_eight_lines(samples):
    lines = str(samples.all_well()).splitlines()
    assert 3 <= len(lines) <= 8
    assert lines[0] == (
        "moepdl 0/0: rewritten, 32 blocks matched, 64 chains, 320 launches, 192 of 320 edges programmatic"
    )
    assert lines[1].startswith("  hf_grouped_mm x32, router R1/R2 softmax, top-k, renormalise, E=128 k=8 T=s77")
    assert lines[1].endswith("at modeling_qwen3_moe.py:231  " + samples.ROUTER_LINE.partition(": ")[2])
    assert "forward 32 chains (T <= 4: 2 launches, 1 of 1 edge programmatic, any T: 5 launches, 2 of 5" in lines[2]
    assert lines[3] == "  PDL on"


def test_a_near_miss_is_shown_as_a_block(samples):
    text = str(samples.sample())
    assert (
        "  candidate topk at proto.py:47  w, i = torch.topk(p, s.k)\n"
        "  nearest formulation: gather_einsum (2 of 3 steps)\n"
        "  failed at 'combine': expert outputs are not reduced with the routing weights\n"
        '    at proto.py:48  a = F.silu(torch.einsum("ti,taoi->tao", x, s.w1[i])) * up\n'
        "    node mul_3\n"
        "    try: multiply by the top-k weights and sum over k"
    ) in text


def test_why_pdl_is_off_and_what_is_pending(samples):
    report = samples.all_well()
    report.pdl_off = "sm_80 is older than sm_90"
    report.phases_pending = ["backward"]
    report.dump_folder = "/tmp/d/rank0/0_0"
    lines = str(report).splitlines()
    assert "  PDL off: sm_80 is older than sm_90" in lines
    assert lines[2].endswith("; backward pending (compiled at the first backward call)")
    assert lines[-1] == "  dump: /tmp/d/rank0/0_0"


def test_a_line_of_a_library_is_shown_from_its_package_on(samples):
    line = "transformers/integrations/moe.py:383"
    for folder in ("/venv/lib/python3.11/site-packages/", "/usr/lib/python3/dist-packages/", "C:\\v\\site-packages\\"):
        where = f"{folder}{line}: a: b = 1"
        report = Report("0/0", "rewritten", matches=[dataclasses.replace(samples.match(0), where=where)])
        report.misses = [dataclasses.replace(samples.sample().misses[0], where=where, at=f"{folder}{line}")]
        text = str(report)
        assert f", at {line}  a: b = 1" in text
        assert f"candidate topk at {line}  a: b = 1" in text
        assert f"    at {line}\n" in text
        assert "-packages" not in text + report._repr_html_()
        assert report.to_dict()["matches"][0]["where"] == where
    assert split_where("mine/site.py:3: x") == ("mine/site.py:3", "x")


def test_a_graph_without_any_candidate_says_so():
    found = PassRecord("find_moe", "capture", "captured", "exact", 0)
    text = str(Report("0/0", "unchanged", passes=[found]))
    assert text == "moepdl 0/0: unchanged, 0 blocks matched: no top-k and no expert matmul found"
    assert str(Report("0/0", "unchanged")) == "moepdl 0/0: unchanged, 0 blocks matched"


def test_a_loop_says_which_stages_it_runs(samples):
    variant = VariantRecord("loop", None, (samples.launch("experts_loop", "x", "y"),))
    back = VariantRecord("loop", None, (samples.launch("experts_loop_backward", "g", "x"),))
    report = samples.all_well()
    report.schedule = [ChainRecord("a", "forward", (variant,), 2), ChainRecord("b", "backward", (back,))]
    nodes = [{"id": name, "label": name} for name in ("grad_act", "grad_pairs", "combine")]
    report.dags = [DagRecord("backward", nodes)]
    lines = [
        "experts_loop: one loop over the experts runs gate_up, down, combine",
        "experts_loop_backward: one loop over the experts runs grad_act, grad_pairs, combine",
    ]
    assert report.loop_lines() == lines
    for line in lines:
        assert f"  {line}" in str(report).splitlines()
        assert line in report._repr_html_()


def test_a_chain_without_programmatic_edges_says_so(samples):
    report = samples.all_well()
    chain = report.schedule[0]
    variant = chain.variants[0]
    plain = dataclasses.replace(variant, edges=(dataclasses.replace(variant.edges[0], programmatic=False),))
    report.schedule = [dataclasses.replace(chain, variants=(plain,))]
    assert report.pdl_text() == "PDL on, no edge is programmatic"


def test_a_block_that_was_left_alone_says_why(samples):
    report = Report("0/0", "unchanged", matches=[dataclasses.replace(samples.match(0), left_alone="fp8 experts")])
    assert str(report).splitlines()[0] == "moepdl 0/0: unchanged, 1 block matched, 1 left alone"
    assert str(report).splitlines()[1].endswith("; left alone: fp8 experts")


def test_a_router_that_stays_says_why():
    match = MatchRecord("mlp", "grouped_mm", None, "sparsemixer is no known rule")
    assert "router left to Inductor (sparsemixer is no known rule)" in str(Report("0/0", "rewritten", matches=[match]))


def test_equal_layers_fold_and_different_ones_do_not(samples):
    report = samples.sample()
    other = dataclasses.replace(samples.match(32), sizes={"E": "64"})
    report.matches.append(other)
    folded = report.folded_matches()
    assert [match.count for match in folded] == [32, 1]
    assert folded[0].block == "model.layers.0.mlp"
    assert len(report.matches) == 33
    assert [(chain.direction, chain.count) for chain in report.folded_schedule()] == [("forward", 32), ("backward", 32)]


def test_folding_adds_counts_that_are_already_folded():
    one = MatchRecord("a", "f", count=3)
    report = Report("0/0", "rewritten", matches=[one, dataclasses.replace(one, block="b", count=2)])
    assert [match.count for match in report.folded_matches()] == [5]
    assert report.summary() == "moepdl 0/0: rewritten, 5 blocks matched"


def test_the_best_attempt_comes_first():
    def miss(name: str, passed: int) -> MissRecord:
        return MissRecord("topk", "a.py:1: x", name, passed, 4, "s", "r")

    report = Report("0/0", "unchanged", misses=[miss("far", 1), miss("near", 3), miss("middle", 2)])
    assert [item.formulation for item in report.folded_misses()] == ["near", "middle", "far"]


def test_round_trip_through_json(samples):
    for report in (samples.sample(), samples.nothing(), samples.hostile()):
        report.dags = [*report.dags]
        again = Report.from_dict(json.loads(report.to_json()))
        assert again == report
        assert again.to_json() == report.to_json()
        assert str(again) == str(report)


def test_values_that_json_lacks_become_text():
    match = MatchRecord("a", "f", sizes={"T": 3}, attributes={"fill": float("-inf"), "shape": (1, 2), "none": None})
    assert match.attributes == {"fill": "-inf", "shape": [1, 2], "none": None}
    assert match.sizes == {"T": "3"}
    report = Report("0/0", "rewritten", matches=[match])
    assert "Infinity" not in report.to_json()
    assert Report.from_dict(json.loads(report.to_json())) == report


def test_from_dict_refuses_another_schema():
    with pytest.raises(MoepdlError, match="not a report of schema 1: schema is 99"):
        Report.from_dict({"schema": 99, "frame": "0/0", "status": "rewritten"})


def test_an_unknown_status_is_refused():
    with pytest.raises(ValueError, match="status 'done' is not one of"):
        Report("0/0", "done")


@pytest.mark.parametrize(
    ("name", "begins", "holds"),
    [
        ("r.html", "<!DOCTYPE html>", "hf_grouped_mm"),
        ("r.json", "{", '"frame": "0/0"'),
        ("r.txt", "moepdl 0/0: rewritten", "PDL on"),
        ("r.dot", "digraph moepdl {", "gate_up"),
        ("r.mmd", "flowchart TD", "gate_up"),
    ],
)
def test_save_writes_what_the_suffix_says(samples, tmp_path, name, begins, holds):
    path = samples.sample().save(tmp_path / "deep" / name)
    text = path.read_text(encoding="utf-8")
    assert text.startswith(begins)
    assert holds in text


def test_save_refuses_other_suffixes(samples, tmp_path):
    with pytest.raises(MoepdlError, match=r"cannot save a report as 'r\.pdf'"):
        samples.sample().save(tmp_path / "r.pdf")


def test_a_notebook_gets_a_fragment(samples):
    fragment = samples.sample()._repr_html_()
    assert "<html" not in fragment
    assert "hf_grouped_mm" in fragment


def test_merge_names_the_frame_of_each_note(samples):
    second = samples.nothing()
    second.notes = ["no tensor operator"]
    second.phases_pending = ["backward"]
    merged = Report.merge([samples.sample(), second])
    assert merged.frame == "0/0 + 1/0"
    assert merged.status == "rewritten"
    assert merged.notes == ["frame 0/0: overlap off: no all-to-all in this graph", "frame 1/0: no tensor operator"]
    assert merged.phases_pending == ["backward"]
    assert len(merged.matches) == 32
    assert Report.merge([second]) is second
    with pytest.raises(ValueError, match="no report"):
        Report.merge([])


def test_a_variant_counts_its_programmatic_edges(samples):
    assert samples.many().programmatic == 2
    assert samples.few().range_text == "T <= 4"
    assert VariantRecord("v").range_text == "any T"


def test_reading_reports_needs_no_torch():
    code = "import sys, moe_compiler.report, moe_compiler.viz.html, moe_compiler.dump; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

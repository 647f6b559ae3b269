"""The HTML report: one well-formed file, no script, no network, all escaped, strokes and words beside colours."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from moe_compiler.report import (
    BranchRecord,
    ChainRecord,
    DagRecord,
    EdgeRecord,
    GraphRecord,
    LaunchRecord,
    Report,
    VariantRecord,
)
from moe_compiler.viz import svg
from moe_compiler.viz.html import MAX_CODE, render, render_fragment

VOID = {"meta", "br", "input", "hr", "img", "link"}


class Checker(HTMLParser):
    """Collects elements, ids and texts, and fails on a tag that closes another one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def plain(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(params=["sample", "all_well", "nothing", "hostile"])
def report(request, samples) -> Report:
    return getattr(samples, request.param)()


def test_one_well_formed_file_without_script_or_network(report):
    text = render(report)
    page = Checker(text)
    assert text.startswith("<!DOCTYPE html>")
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "use", "foreignobject"}
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "src"):
            assert attributes.get(name, "#").startswith("#")
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0


def test_ids_are_unique_and_links_and_labels_find_theirs(report):
    page = Checker(render(report))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        if "href" in attributes:
            assert attributes["href"][1:] in ids
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
    for used in re.findall(r"url\(#([^)]*)\)", render(report)):
        assert used in ids


def test_everything_is_escaped(samples):
    text = render(samples.hostile())
    assert "<script" not in text
    assert text.count("</style>") == 1
    assert "&lt;script&gt;" in text
    assert "<script>alert(" in Checker(text).plain


def test_what_the_reader_finds(samples):
    plain = Checker(render(samples.sample())).plain
    for words in (
        "32 blocks matched",
        "1 candidate missed",
        "64 chains of launches",
        "192 / 320 edges programmatic",
        "hf_grouped_mm ×32 router R1/R2 softmax, top-k, renormalise",
        "model.layers.0.mlp and 31 equal blocks",
        "nearest formulation gather_einsum ●●○ 2 of 3 steps",
        "Failed at combine : expert outputs are not reduced with the routing weights",
        "T <= 4 · 2 launches · 1 of 1 edge programmatic · 8.1 µs predicted",
        "aten.t −64 aten.linear +32",
        "pdl auto environment, MOEPDL_PDL",
        "capability 9.0",
        "overlap off: no all-to-all in this graph",
    ):
        assert words in plain, words


def test_what_pass_changed_is_told_with_signs(samples):
    text = render(samples.sample())
    assert '<span class="minus">-y = x &lt; 2</span>' in text
    assert '<span class="plus">+y = experts(x)</span>' in text
    assert "Changes against 00 captured" in text


def test_the_status_is_a_word_and_a_sign(samples):
    for status, sign in (("rewritten", "✓"), ("unchanged", "–"), ("dryrun", "○"), ("fallback", "!")):
        plain = Checker(render(Report("0/0", status))).plain
        assert f"{sign}{status}" in plain.replace(" ", "")


def test_lanes_hatch_the_early_start_and_stroke_each_kind_of_edge(samples):
    picture = svg.swim_lanes(samples.many(), "t", "title")
    assert picture.count('class="early"') == 2
    assert picture.count('class="line pdl"') == 2
    assert picture.count('class="line plain"') == 1
    assert picture.count('class="line data"') == 2
    assert picture.count('class="band"') == 2
    assert "starts 2.9 µs before its producer ends" in picture
    assert "programmatic edge, raw through perm, starts; adjacent; gain 2.90 µs predicted" in picture
    assert '<title id="t-title">title</title>' in picture


def plain_lane(*edges: tuple[int, int, str]) -> VariantRecord:
    launches = tuple(LaunchRecord(f"k{index}") for index in range(4))
    return VariantRecord("v", None, launches, tuple(EdgeRecord(*edge) for edge in edges))


def test_plain_neighbours_are_solid_and_everything_else_is_dashed():
    variant = plain_lane((0, 1, "raw"), (1, 2, "war"), (2, 3, "order"), (0, 2, "raw"), (0, 3, "effect"))
    styles = [svg.edge_style(edge, variant) for edge in variant.edges]
    assert styles == ["plain", "plain", "data", "data", "data"]
    picture = svg.swim_lanes(variant, "t", "title")
    assert picture.count('class="line plain"') == 2 and picture.count('class="line data"') == 3
    assert "k0 to k1: plain edge, raw" in picture


@pytest.mark.parametrize("name", ["many", "backward", "plain"])
def test_edges_to_no_neighbour_run_beside_the_bars_and_are_drawn_over_them(samples, name):
    variant = plain_lane((0, 2, "raw"), (0, 3, "raw"), (1, 3, "raw")) if name == "plain" else getattr(samples, name)()
    picture = svg.swim_lanes(variant, "t", "title")
    bars = [
        tuple(map(float, found))
        for found in re.findall(r'<rect class="bar[^"]*" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', picture)
    ]
    paths = re.findall(r'class="line data" d="M([\d.]+) ([\d.]+) V([\d.]+) H([\d.]+)"', picture)
    assert len(paths) == picture.count('class="line data"') > 0
    assert picture.rindex('<rect class="bar') < picture.index('class="line data"')
    for x1, y1, y2, x2 in (tuple(map(float, path)) for path in paths):
        low, high = sorted((y1, y2))
        for x, y, width in bars:
            assert not (low < y + 9 < high - 9 and x <= x1 <= x + width)
            assert not (y < y2 < y + 18 and x1 < x + width and x < x2)
    entries = [(x2, y2) for _, _, y2, x2 in paths]
    assert len(entries) == len(set(entries))


def test_the_legend_has_only_what_is_there(samples):
    report = Report("0/0", "rewritten", schedule=[ChainRecord("c", "forward", (plain_lane((0, 1, "raw")),))])
    plain = Checker(render(report)).plain
    assert "plain edge" in plain
    for words in ("programmatic edge (PDL)", "not neighbours", "hatched"):
        assert words not in plain
        assert words in Checker(render(samples.sample())).plain
    report.schedule = [ChainRecord("c", "forward", (plain_lane(),))]
    assert 'class="legend"' not in render(report)


def test_lanes_are_to_scale(samples):
    picture = svg.swim_lanes(samples.few(), "t", "title")
    bars = [
        (float(x), float(width))
        for x, width in re.findall(r'<rect class="bar" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', picture)
    ]
    (first_x, first_width), (second_x, second_width) = bars
    assert second_width / first_width == pytest.approx(3.9 / 5.8, rel=1e-3)
    assert (second_x - first_x) / first_width == pytest.approx((5.8 - 1.6) / 5.8, rel=1e-3)


def test_without_predictions_the_axis_counts_units(samples):
    report = samples.all_well()
    chain = report.schedule[0]
    launches = tuple(samples.launch(item.kernel, "a", "b") for item in chain.variants[1].launches)
    bare = type(chain.variants[1])("many", None, launches, chain.variants[1].edges)
    report.schedule = [ChainRecord("c", "forward", (bare,))]
    plain = Checker(render(report)).plain
    assert "no prediction: each launch is drawn as one unit" in plain
    assert "µs" not in svg.swim_lanes(bare, "t", "title").replace("gain 2.90 µs predicted", "").replace(
        "gain 4.50 µs predicted", ""
    )


def test_the_dag_has_a_shape_a_kind(samples):
    text = render(Report("0/0", "rewritten", dags=[samples.dag()]))
    assert text.count('<polygon class="box exchange"') == 2
    assert text.count('class="box end"') == 2
    assert text.count('class="box"') == 6
    assert text.count(">PDL</text>") == 3


def test_a_large_dag_is_folded_and_says_so():
    nodes = [{"id": str(index), "label": f"stage {index % 5}"} for index in range(500)]
    edges = [{"source": str(index), "target": str(index + 1), "kind": "raw"} for index in range(499)]
    report = Report("0/0", "rewritten", dags=[DagRecord("forward", nodes, edges)])
    plain = Checker(render(report)).plain
    assert "500 nodes are folded by label into 5" in plain


def test_long_code_is_cut_with_a_note():
    report = Report("0/0", "rewritten", graphs=[GraphRecord(0, "captured", "capture", "x\n" * MAX_CODE)])
    text = render(report)
    assert len(text) < 2 * MAX_CODE
    assert f"{MAX_CODE} more characters are in the dump folder" in text


def test_both_themes_and_no_style_outside_the_report(samples):
    fragment = render_fragment(samples.sample())
    style = fragment[: fragment.index("</style>")].removeprefix("<style>")
    assert "prefers-color-scheme: dark" in style
    selectors = re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]*\{", "", style))
    assert selectors
    for selector in selectors:
        for part in selector.split(","):
            assert part.strip().startswith(".moepdl"), part


def test_the_same_report_gives_the_same_bytes(report):
    assert render(report) == render(report)


def test_branches_beside_a_chain_are_told(samples):
    branch = BranchRecord(("a", "b"), ("mm", "mul"), ("gate_up", "down"), "64*T", "128*T", {"a": 3.25}, 1.5, 8)
    dag = DagRecord("forward", [{"id": "a"}, {"id": "b"}], [], (branch, dataclasses.replace(branch, nodes=("c", "d"))))
    page = render(dataclasses.replace(samples.sample(), dags=[dag]))
    assert (
        "branch x2 of 2 nodes (1 matmul, 3.2 us predicted) may overlap with gate_up, down; a second stream is "
        "predicted to gain 1.5 us at T=8; it runs on the chain&#x27;s stream"
    ) in page

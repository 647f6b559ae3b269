"""`moepdl bench block` on a CPU: files and tables, wrong, failing and interrupted ways, errors of the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from moe_compiler import cli
from moe_compiler.bench import command, ways
from moe_compiler.bench.floor import Speed, floor_us
from moe_compiler.bench.results import load, markdown, table
from moe_compiler.bench.shapes import find_shape

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "peers_torch.py"
SHAPE = "8,2,64,32"
# Without Inductor, so that a test takes seconds; the first test is with it.
QUICK = ("--shape", SHAPE, "--device", "cpu", "--reference-tokens", "none", "--backend-options", "remainder=eager")
FIELDS = {"shape", "tokens", "direction", "mode", "us", "floor_us", "peers", "problems", "fraction_of_floor", "ratios"}
FIELDS |= {"spellings", "outside", "memory_bytes", "peers_memory_bytes", "experts_hit", "near_ties", "calls"}


def bench(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["bench", "block", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows_of(folder: Path, name: str = "8x2x64x32") -> list[dict]:
    return json.loads((folder / f"{name}.json").read_text())["rows"]


def peers(folder: Path, text: str) -> Path:
    path = folder / "peers.py"
    path.write_text("import torch\n" + text)
    return path


@pytest.mark.slow
def test_a_whole_run_with_inductor(tmp_path, capsys):
    arguments = ("--tokens", "4", "1", "--device", "cpu", "--out", tmp_path, "--no-plot", "--reference-tokens", "1")
    code, out, _ = bench(capsys, "--shape", SHAPE, *arguments)
    assert code == 0
    data = json.loads((tmp_path / "8x2x64x32.json").read_text())
    assert [(row["tokens"], row["mode"]) for row in data["rows"]] == [(1, "nograph"), (4, "nograph")]
    speed = Speed(data["floor"]["bandwidth"], data["floor"]["flops"], "")
    for row in data["rows"]:
        assert set(row) == FIELDS
        assert (row["shape"], row["direction"], row["problems"]) == (SHAPE, "forward", {})
        assert set(row["peers"]) == ({"eager", "inductor"} if row["tokens"] == 1 else {"eager"})
        assert row["us"] > 0 and all(us > 0 for us in row["peers"].values())
        assert row["fraction_of_floor"] == row["floor_us"] / row["us"]
        wanted = floor_us(find_shape(SHAPE), row["tokens"], row["experts_hit"], "forward", speed, 4)
        assert row["floor_us"] == pytest.approx(wanted)
        for name, (value, low, high) in row["ratios"].items():
            assert low <= value <= high and value == pytest.approx(row["us"] / row["peers"][name])
        assert row["memory_bytes"] is None
    assert data["rows"][0]["experts_hit"] == 2
    environment = data["environment"]
    assert environment["torch"] == torch.__version__
    assert (environment["dtype"], environment["seed"], environment["backend_options"]) == ("float32", 0, {})
    assert environment["generator"] == "torch.Generator('cpu')" and environment["commit"] and environment["device"]
    assert data["shape"]["experts"] == 8 and data["schema"] == 1
    assert "| T | mode | floor | moepdl | floor / moepdl | eager | inductor |" in out
    page = (tmp_path / "8x2x64x32.md").read_text()
    assert page == markdown(load(tmp_path / "8x2x64x32.json"))
    assert "floor: weights of the distinct experts hit, or 6 T k H I FLOP" in page and "measured: a copy" in page


def test_forward_and_backward_with_the_peers_of_the_example(tmp_path, capsys):
    code, _, _ = bench(
        capsys,
        *(*QUICK, "--tokens", 5, 70, "--direction", "forward", "forward_backward", "--out", tmp_path),
        *("--peers", EXAMPLE, "--no-plot"),
    )
    assert code == 0
    rows = {(row["direction"], row["tokens"]): row for row in rows_of(tmp_path)}
    assert all(row["problems"] == {} for row in rows.values())
    assert set(rows["forward", 5]["peers"]) == {"eager", "loop", "all_experts"}
    assert set(rows["forward", 70]["peers"]) == {"eager", "loop"}  # the other declines
    assert rows["forward", 5]["outside"] == {"all_experts": ["router", "scores"]}
    assert rows["forward_backward", 5]["outside"] == {"all_experts": ["router"]}
    assert rows["forward_backward", 70]["floor_us"] > rows["forward", 70]["floor_us"]
    page = (tmp_path / "8x2x64x32.md").read_text()
    assert "- all_experts: outside its timed calls: router, scores." in page
    assert "- loop: A loop over the experts that were hit" in page
    assert "## Forward, us" in page and "## Forward + backward, us" in page


WRONG = """
def peer_wrong(block):
    return lambda x: block.module(x) * 1.01

def peer_no_backward(block):
    return lambda x: block.module(x).detach() if block.direction == "forward" else block.module(x.detach())

def peer_broken(block):
    raise RuntimeError("this one needs\\nmore than there is")

def peer_large(block):
    def forward(x):
        if block.tokens == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB")
        return block.module(x)
    return forward
"""


def test_wrong_failing_and_large_peers_are_told_and_the_rest_goes_on(tmp_path, capsys):
    code, out, _ = bench(
        capsys,
        *(*QUICK, "--tokens", 4, 9, "--direction", "forward", "forward_backward", "--out", tmp_path),
        *("--peers", peers(tmp_path, WRONG), "--no-plot"),
    )
    assert code == 0  # what is wrong with a peer is not moepdl's fault
    rows = {(row["direction"], row["tokens"]): row for row in rows_of(tmp_path)}
    for (direction, tokens), row in rows.items():
        assert row["us"] > 0
        assert row["problems"]["wrong"].startswith("wrong, not timed: error 1.0e-02 against float64")
        assert row["problems"]["broken"] == "RuntimeError: this one needs"
        assert ("large" in row["peers"]) is (tokens == 9)
        assert row["problems"].get("large") == ("out of memory" if tokens == 4 else None)
        assert ("no_backward" in row["peers"]) is (direction == "forward")
        assert not {"wrong", "broken"} & set(row["peers"])
    assert "gradient of x: error inf" in rows["forward_backward", 4]["problems"]["no_backward"]
    page = (tmp_path / "8x2x64x32.md").read_text()
    # In one line where even the numbers are the same.
    assert re.search(r"^- forward, T=4(, 9)?, wrong: wrong, not timed: error 1\.0e-02", page, flags=re.MULTILINE)
    assert "- forward, T=4, 9, broken: RuntimeError: this one needs" in page
    assert "- forward, T=4, large: out of memory" in page
    assert "large: out of memory" in out


def test_moepdl_itself_out_of_memory_is_a_row_and_no_failure(tmp_path, capsys, monkeypatch):
    real = ways.Compiled.ours

    def ours(self, x):
        if x.shape[0] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, x)

    monkeypatch.setattr(ways.Compiled, "ours", ours)
    code, out, _ = bench(capsys, *QUICK, "--tokens", 4, 9, "--out", tmp_path, "--no-plot")
    assert code == 0
    first, second = rows_of(tmp_path)
    assert (first["us"], first["fraction_of_floor"], first["problems"]) == (None, None, {"moepdl": "out of memory"})
    assert first["floor_us"] > 0 and first["peers"]["eager"] > 0 and first["ratios"] == {}
    assert second["us"] > 0
    assert "| 4 | nograph |" in out and "| out of memory | - |" in out


def test_an_input_that_does_not_fit_is_a_row_too(tmp_path, capsys, monkeypatch):
    from moe_compiler.bench import measuring

    def too_much(*arguments):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(measuring, "_inputs", too_much)
    code, _, _ = bench(capsys, *QUICK, "--tokens", 4, "--out", tmp_path, "--no-plot")
    assert code == 0
    (row,) = rows_of(tmp_path)
    assert (row["us"], row["floor_us"], row["problems"]) == (None, None, {"moepdl": "out of memory"})
    assert "| 4 | nograph | - | out of memory | - |" in (tmp_path / "8x2x64x32.md").read_text()


def test_where_eager_does_not_fit_the_others_are_judged_all_the_same(tmp_path, capsys, monkeypatch):
    def eager(self):
        def call(x):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return ways.Way("eager", call, "grouped_mm")

    monkeypatch.setattr(ways.Compiled, "eager", eager)
    wrong = "def peer_wrong(block):\n    return lambda x: block.module(x) * 1.01\n"
    wrong += "def peer_right(block):\n    return lambda x: block.module(x)\n"
    for direction in ("forward", "forward_backward"):
        out = tmp_path / direction
        arguments = (
            "--tokens",
            4,
            "--direction",
            direction,
            "--out",
            out,
            "--peers",
            peers(tmp_path, wrong),
            "--no-plot",
        )
        assert bench(capsys, *QUICK, *arguments)[0] == 0
        (row,) = rows_of(out)
        assert row["us"] > 0 and set(row["peers"]) == {"right"}
        assert row["problems"]["eager grouped_mm"] == "out of memory"
        assert row["problems"]["wrong"].startswith("wrong, not timed")


def test_what_fails_after_its_check_is_dropped(tmp_path, capsys):
    text = """
def peer_once(block):
    calls = []
    def forward(x):
        calls.append(x)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return block.module(x)
    return forward
"""
    arguments = ("--tokens", 4, "--out", tmp_path, "--peers", peers(tmp_path, text), "--no-plot")
    assert bench(capsys, *QUICK, *arguments)[0] == 0
    (row,) = rows_of(tmp_path)
    assert row["us"] > 0 and set(row["peers"]) == {"eager"} and row["problems"] == {"once": "out of memory"}


def test_moepdl_wrong_is_a_failure(tmp_path, capsys, monkeypatch):
    real = ways.Compiled.ours

    def ours(self, x):
        way = real(self, x)
        return ways.Way(way.name, lambda x: way.call(x) + 0.1)

    monkeypatch.setattr(ways.Compiled, "ours", ours)
    code, _, _ = bench(capsys, *QUICK, "--tokens", 4, "--out", tmp_path, "--no-plot")
    assert code == 1
    (row,) = rows_of(tmp_path)
    assert row["us"] is None and row["problems"]["moepdl"].startswith("wrong, not timed: error ")


def test_a_block_that_is_not_rewritten_is_a_failure(tmp_path, capsys):
    quick = (*QUICK[:-1], "remainder=eager", 'disable=["batched_mm"]')
    code, _, _ = bench(capsys, *quick, "--tokens", 300, "--out", tmp_path, "--no-plot")
    assert code == 1
    (row,) = rows_of(tmp_path)
    assert row["us"] > 0 and row["problems"]["moepdl"].startswith("not rewritten, what was timed is Inductor's")


INTERRUPT = """
def peer_interrupt(block):
    if block.tokens == 9:
        raise KeyboardInterrupt
    return block.module
"""


def test_an_interrupt_leaves_what_there_is(tmp_path, capsys):
    code, out, _ = bench(
        capsys, *QUICK, "--tokens", 4, 9, "--out", tmp_path, "--peers", peers(tmp_path, INTERRUPT), "--no-plot"
    )
    assert code == 130
    assert [row["tokens"] for row in rows_of(tmp_path)] == [4]
    assert "Interrupted: what is missing was not measured." in (tmp_path / "8x2x64x32.md").read_text()
    assert "| 4 | nograph |" in out


def test_results_are_written_after_each_number_of_tokens(tmp_path, capsys):
    """A peer that looks at the file while the next case runs finds the rows of those before."""
    text = f"""
import json, pathlib
def peer_looks(block):
    path = pathlib.Path({str(tmp_path)!r}) / "8x2x64x32.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    pathlib.Path({str(tmp_path)!r}, f"seen{{block.tokens}}").write_text(str([row["tokens"] for row in rows]))
"""
    bench(capsys, *QUICK, "--tokens", 1, 4, 9, "--out", tmp_path, "--peers", peers(tmp_path, text), "--no-plot")
    assert [(tmp_path / f"seen{tokens}").read_text() for tokens in (1, 4, 9)] == ["[]", "[1]", "[1, 4]"]


def test_json_on_stdout(tmp_path, capsys):
    code, out, _ = bench(capsys, *QUICK, "--tokens", 4, "--out", tmp_path, "--no-plot", "--json")
    assert code == 0
    (data,) = json.loads(out)
    assert data == json.loads((tmp_path / "8x2x64x32.json").read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """The JSON of a run."""
    folder = tmp_path_factory.mktemp("measured")
    assert command.main(["block", *QUICK, "--tokens", "4", "9", "--out", str(folder), "--no-plot"]) == 0
    return folder / "8x2x64x32.json"


def test_from_writes_the_same_page_elsewhere(tmp_path, capsys, measured):
    code, out, _ = bench(capsys, "--from", measured, "--out", tmp_path / "new", "--no-plot")
    assert code == 0
    assert (tmp_path / "new" / "8x2x64x32.md").read_bytes() == measured.with_suffix(".md").read_bytes()
    assert "| 9 | nograph |" in out
    assert not (tmp_path / "new" / "8x2x64x32.json").exists()  # nothing was measured


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"schema": 0}'])
def test_from_a_file_that_holds_none(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    code, _, err = bench(capsys, "--from", path)
    assert code == 1 and str(path) in err and "try:" in err
    assert bench(capsys, "--from", tmp_path / "none.json")[0] == 1


def test_the_picture_is_byte_stable_and_names_every_way(tmp_path, capsys, measured):
    pytest.importorskip("matplotlib")
    texts = []
    for name in ("a", "b"):
        assert bench(capsys, "--from", measured, "--out", tmp_path / name)[0] == 0
        texts.append((tmp_path / name / "8x2x64x32.svg").read_text())
    assert texts[0] == texts[1]
    for text in (">floor<", ">moepdl<", ">eager<", ">tokens T<", ">microseconds<", "forward, call by call"):
        assert text in texts[0]


def test_without_matplotlib_the_numbers_are_there_all_the_same(tmp_path, capsys, measured, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = bench(capsys, "--from", measured, "--out", tmp_path)
    assert code == 0
    assert "| 4 | nograph |" in out
    assert "pip install 'moepdl[bench]'" in err and "matplotlib" in err
    assert (tmp_path / "8x2x64x32.md").exists() and not (tmp_path / "8x2x64x32.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shape", "zzz"), "--shape 128,8,2048,768"),
        (("--shape", "qwen"), "try: qwen3"),
        (("--shape", "olmo"), "try: olmoe"),
        (("--tokens", "0"), "'0' is no number of tokens"),
        (("--tokens", "1.5"), "'1.5' is no number of tokens"),
        (("--tokens", "-4"), "no number of tokens"),
        (("--mode", "graph", "--device", "cpu"), "--mode graph needs a GPU"),
        (("--backend-options", "pdl"), "'pdl' is not KEY=VALUE"),
        (("--backend-options", "pld=off", "--shape", SHAPE), "pdl"),
        (("--peers", "none.py", "--shape", SHAPE), "there is no file none.py"),
        (("--reference-tokens", "3", "--tokens", "4", "--shape", SHAPE), "--reference-tokens: 3 is not measured"),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_helps(tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    try:
        code, _, err = bench(capsys, *arguments)
    except SystemExit as stopped:  # argparse's own
        code, err = stopped.code, capsys.readouterr().err
    assert code == 2 and said in err
    assert not (tmp_path / "out").exists()


def test_cuda_where_there_is_none(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = bench(capsys, "--device", "cuda")
    assert code == 2 and "torch.cuda.is_available() is False" in err


@pytest.mark.parametrize(
    ("wanted", "tokens", "found"),
    [
        (None, (1, 4), {1, 4}),
        (None, (1, 4, 8, 16, 32, 64, 128, 512, 1024, 2048, 4096, 8192), {1, 16, 128, 1024, 8192}),
        (["all"], range(1, 20), set(range(1, 20))),
        (["none"], (1, 4), set()),
        (["4"], (1, 4), {4}),
    ],
)
def test_where_inductor_is_compiled(wanted, tokens, found):
    assert command._references(wanted, tokens) == found


def test_modes_on_a_gpu_and_on_a_cpu():
    assert command._modes(None, "cuda") == {"forward": ("graph", "nograph"), "forward_backward": ("nograph",)}
    assert command._modes(None, "cpu") == {"forward": ("nograph",), "forward_backward": ("nograph",)}
    both = ("graph", "nograph")
    assert command._modes(["nograph", "graph"], "cuda") == {"forward": both, "forward_backward": both}


def row(**values):
    base = {"shape": "s", "tokens": 1, "direction": "forward", "mode": "graph", "us": 20.0, "floor_us": 10.0}
    base |= {"fraction_of_floor": 0.5, "peers": {"eager": 40.0, "inductor": 30.0}, "problems": {}, "ratios": {}}
    return base | values


def test_the_table_says_what_is_missing_and_why():
    text = table(
        [
            row(ratios={"eager": [0.5, 0.4, 0.6], "inductor": [0.67, 0.6, 0.7]}, memory_bytes=2**20),
            row(
                tokens=4,
                peers={"eager": 41.0},
                problems={"vllm": "wrong, not timed: error 1"},
                outside={"vllm": ["router"]},
            ),
            row(
                tokens=8,
                us=None,
                fraction_of_floor=None,
                problems={"moepdl": "KernelError: no", "inductor, graph": "x"},
            ),
        ]
    ).splitlines()
    assert text[0] == (
        "| T | mode | floor | moepdl | floor / moepdl | eager | inductor | vllm | moepdl / best of them (95 %) | "
        "MiB: moepdl (least of them) |"
    )
    assert text[2] == "| 1 | graph | 10 | 20 | 0.50 | 40 | 30 | - | 0.67 (0.60-0.70) inductor | 1 |"
    assert text[3] == "| 4 | graph | 10 | 20 | 0.50 | 41 | - | wrong | - | - |"
    assert text[4] == "| 8 | graph | 10 | failed | - | 40 | 30 | - | - | - |"


def test_help_names_every_shape(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "block", "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "deepseek-v3" in out and "--peers" in out
    assert cli.main([]) == 2 and "bench" in capsys.readouterr().out

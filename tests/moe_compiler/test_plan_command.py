"""`moepdl plan` on the command line: text, JSON, timeline, errors that say what to do, and docs/plan.md's examples."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moe_compiler import cli
from moe_compiler.device_model import device_model

DOC = Path(__file__).resolve().parent.parent.parent / "docs" / "plan.md"


@pytest.fixture(autouse=True)
def shipped_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEPDL_CACHE_DIR", str(tmp_path / "cache"))
    device_model.cache_clear()
    yield
    device_model.cache_clear()


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_documents_example_prints_what_it_shows(capsys):
    examples = re.findall(r"```\n\$ moepdl plan (.*?)\n(.*?)```", DOC.read_text(), flags=re.S)
    assert len(examples) >= 2
    for arguments, shown in examples:
        code, out, err = run(capsys, *shlex.split(arguments))
        assert code == cli.DONE, err
        assert out == shown


NUMBER = (int, float)
CASE = {"tokens": int, "capacity": int, "directions": list, "block_us": NUMBER, "exposed_us": NUMBER}
DIRECTION = {
    "direction": str,
    "chosen": {"out": str, "out_ctas": int, "home": str, "home_ctas": int, "order": str, "chunks": int},
    "label": str,
    "why": str,
    "block_us": NUMBER,
    "plain_us": NUMBER,
    "plain": str,
    "gain_us": NUMBER,
    "local_us": NUMBER,
    "exposed_us": NUMBER,
    "exposed_share": NUMBER,
    "plain_exposed_us": NUMBER,
    "one_rank_us": NUMBER,
    "speedup": NUMBER,
    "layers_us": NUMBER,
    "exchanges": list,
    "imbalance": NUMBER,
    "waited_us": {"mean": NUMBER, "most": NUMBER},
    "unused": {"slots": int, "rows": NUMBER, "us": NUMBER, "pairs_bytes": int},
    "not_possible_yet": dict,
    "considered": list,
}
EXCHANGE = {
    "name": str,
    "transport": str,
    "sent_bytes": int,
    "between_nodes_bytes": int,
    "logical_bytes": int,
    "us": NUMBER,
    "real_gbs": NUMBER,
    "logical_gbs": NUMBER,
}
PLAN = {
    "version": int,
    "shape": str,
    "sizes": {"experts": int, "k": int, "hidden": int, "intermediate": int, "shared": int, "dtype": str},
    "ranks": int,
    "classes": int,
    "placement": str,
    "routing": {"name": str, "ranks_a_token": NUMBER, "other_ranks_a_token": NUMBER},
    "device": str,
    "predictions": str,
    "links": dict,
    "layers": int,
    "cases": list,
}


def check(value: Any, form: Any, where: str = "plan") -> None:
    if isinstance(form, dict):
        assert set(form) <= set(value), where
        for key, inner in form.items():
            check(value[key], inner, f"{where}.{key}")
    else:
        assert isinstance(value, form), (where, value)


def test_the_json_has_its_form(capsys):
    code, out, _ = run(capsys, "--tokens", "64", "4096", "--ranks", "2", "--direction", "forward_backward", "--json")
    record = json.loads(out)
    assert code == cli.DONE
    check(record, PLAN)
    assert record["version"] == 1
    assert [case["tokens"] for case in record["cases"]] == [64, 4096]
    for case in record["cases"]:
        check(case, CASE)
        assert [each["direction"] for each in case["directions"]] == ["forward", "backward"]
        assert case["block_us"] == pytest.approx(sum(each["block_us"] for each in case["directions"]), abs=0.01)
        for each in case["directions"]:
            check(each, DIRECTION)
            for exchange in each["exchanges"]:
                check(exchange, EXCHANGE)
                assert exchange["real_gbs"] == pytest.approx(exchange["sent_bytes"] / exchange["us"] / 1e3, abs=0.02)
            assert each["speedup"] == pytest.approx(2 * each["one_rank_us"] / each["block_us"], abs=0.01)
            assert each["gain_us"] == pytest.approx(each["plain_us"] - each["block_us"], abs=0.01)
            assert each["considered"] == sorted(each["considered"], key=lambda way: way["us"])
    names = [exchange["name"] for exchange in record["cases"][0]["directions"][1]["exchanges"]]
    assert names == ["ep_redispatch", "ep_return_weights", "ep_combine"]


def test_two_ranks_send_each_token_once(capsys):
    _, out, _ = run(capsys, "--tokens", "4096", "--ranks", "2", "--json")
    dispatch = json.loads(out)["cases"][0]["directions"][0]["exchanges"][0]
    share = 0.99690413
    row = 2048 * 2 + 8 * (8 + 2)
    assert dispatch["sent_bytes"] == pytest.approx(4096 * share * row, rel=1e-6)
    assert dispatch["logical_bytes"] == pytest.approx(2 * 4096 * share * row, rel=1e-6)


def test_text_says_what_json_says(capsys):
    arguments = ("--tokens", "4096", "--ranks", "8", "--layers", "3", "--node", "4", "--node-gbs", "200")
    record = json.loads(run(capsys, *arguments, "--json")[1])
    _, out, _ = run(capsys, *arguments)
    each = record["cases"][0]["directions"][0]
    assert f"T=4096 a rank, forward: {each['label']}\n" in out
    assert f"block {each['block_us']:.1f} us; without overlap {each['plain_us']:.1f} us" in out
    assert f"exposed {each['exposed_us']:.1f} us ({each['exposed_share']:.1%})" in out
    assert f"3 layers {each['layers_us'] / 1e3:.2f} ms" in out
    assert f"why: {each['why']}" in out
    assert "nodes of 4, 200 GB/s a node each way, 8 us" in out
    assert each["layers_us"] == pytest.approx(3 * each["block_us"], rel=0.01)
    assert each["exchanges"][0]["between_nodes_bytes"] > 0
    assert len(each["exchanges"]) == 2 * each["chosen"]["chunks"]


def test_the_options_that_change_the_traffic(capsys, tmp_path):
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([100] + [1] * 127))

    def case(*arguments: str) -> dict[str, Any]:
        return json.loads(run(capsys, "--tokens", "256", "--ranks", "4", *arguments, "--json")[1])

    plain, zipf = case(), case("--skew", "zipf")
    spread, filed = case("--skew", "zipf", "--placement", "round_robin"), case("--skew", str(counts))
    assert plain["classes"] == 1 and zipf["classes"] == 4

    def imbalance(record: dict[str, Any]) -> float:
        return record["cases"][0]["directions"][0]["imbalance"]

    assert imbalance(plain) == 1.0
    assert imbalance(zipf) > imbalance(spread) > 1.0
    assert filed["routing"]["name"] == "counts.json" and imbalance(filed) > 1.1
    limited = case("--transports", "distributed", "--overlap", "on", "--chunks", "4")
    chosen = limited["cases"][0]["directions"][0]["chosen"]
    assert (chosen["out"], chosen["home"], chosen["order"], chosen["chunks"]) == ("distributed",) * 2 + ("chunks", 4)
    assert case("--capacity", "512")["cases"][0]["directions"][0]["unused"]["slots"] == 4 * 512


def test_the_timeline(capsys, tmp_path):
    path = tmp_path / "out" / "plan.json"
    code, _, _ = run(
        capsys, "--ranks", "16", "--tokens", "4096", "--skew", "zipf", "--direction", "forward_backward",
        "--layers", "2", "--timeline", str(path),
    )  # fmt: skip
    assert code == cli.DONE
    written = json.loads(path.read_text())
    events = written["traceEvents"]
    assert written["otherData"]["classes"] == 16 and written["otherData"]["classes_shown"] == 8
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(processes) == 8
    slices = [event for event in events if event["ph"] == "X"]
    names = {event["name"] for event in slices}
    assert {"gate_up@0", "gate_up@1"} <= names or {"gate_up.remote@0", "gate_up.chunk0@0"} & names
    for process in range(1, 9):
        for thread in (1, 2):
            row = [(e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == (process, thread)]
            assert row == sorted(row)
            assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(row))
    flows = [event for event in events if event["ph"] in "sf"]
    assert len(flows) == 2 * sum(event["cat"] == "wait" for event in slices)
    for start, finish in zip(flows[::2], flows[1::2], strict=True):
        assert start["id"] == finish["id"] and start["ts"] <= finish["ts"] + 0.01


@pytest.mark.parametrize(
    ("arguments", "what", "why", "try_"),
    [
        (["--ranks", "0"], "--ranks 0: a group has 1 to 4096 ranks", "never simulated", "--ranks 1"),
        (["--ranks", "5000"], "--ranks 5000", "never simulated", "--ranks 4096"),
        (["--tokens", "64", "0"], "--tokens 0: numbers of tokens are from 1 on", "of each rank", "--tokens 128"),
        (["--layers", "0"], "--layers 0", "follow each other", "--layers 1"),
        (["--capacity", "100", "--tokens", "128"], "--capacity 100 is less", "takes a slot", "--capacity 128"),
        (["--link-gbs", "0"], "--link-gbs 0 is no bandwidth", "above zero", "--link-gbs 370"),
        (["--link-gbs", "nan"], "--link-gbs nan is no bandwidth", "above zero", "--link-gbs 370"),
        (["--latency-us", "-1"], "--latency-us -1 is no time", "from zero on", "--latency-us 3"),
        (["--node", "8"], "--node 8 without --node-gbs", "crosses between nodes", "--node-gbs 400"),
        (["--node-gbs", "50"], "--node-gbs without --node", "one node", "--node 8"),
        (["--node", "0", "--node-gbs", "50"], "--node 0", "number of its ranks", "--node 8"),
        (["--chunks", "-1"], "--chunks -1", "0 leaves the number", "--chunks 2"),
        (["--transports", "pusch"], "there is no transport 'pusch'", "fused, push, copy_engine", "--transports push"),
        (
            ["--transports", "push", "--ranks", "16", "--node", "8", "--node-gbs", "400"],
            "--transports push with 2 nodes",
            "between nodes works distributed alone",
            "--transports distributed",
        ),
        (["--shape", "qwen"], "there is no shape 'qwen'", "the shapes are", "qwen3"),
        (["--skew", "zip"], "--skew 'zip' is neither uniform nor zipf", "JSON list of 128", "--skew zipf"),
        (
            ["--device", "NVIDIA H20"],
            "there is no table of kernel times for --device 'NVIDIA H20'",
            "shipped",
            "calibrate",
        ),
    ],
)
def test_errors_say_what_why_and_what_to_try(capsys, arguments: list[str], what: str, why: str, try_: str):
    code, out, err = run(capsys, *arguments)
    assert code == cli.MISUSED
    assert out == ""
    first, *others = err.splitlines()
    assert first.startswith(f"moepdl: {what}")
    assert any(line.startswith("  why: ") and why in line for line in others)
    assert any(line.startswith("  try: ") and try_ in line for line in others)
    code, _, err = run(capsys, *arguments, "--json")
    assert code == cli.MISUSED
    assert json.loads(err)["error"] == "UsageError"


def test_a_timeline_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "--ranks", "2", "--timeline", str(tmp_path / "file" / "plan.json"))
    assert code == cli.FAILED
    assert "cannot be written" in err and "try:" in err


def test_what_argparse_refuses_and_the_help(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["plan", "--direction", "sideways"])
    assert raised.value.code == cli.MISUSED
    with pytest.raises(SystemExit) as raised:
        cli.main(["plan", "--help"])
    assert raised.value.code == 0
    assert "compared with a run on several GPUs yet" in " ".join(capsys.readouterr().out.split())

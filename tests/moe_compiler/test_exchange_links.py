"""The table of links: what is shipped agrees with what was measured, and what is no table is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_compiler.exchange_plan import links as module
from moe_compiler.exchange_plan.links import Links, link_table, load_links
from moe_compiler.exchange_plan.operation import Carrier, Rows
from moe_compiler.exchange_plan.simulate import flight_of
from tests.moe_compiler.exchange_cases import FAST, fixed, group

SHIPPED = Path(module.__file__).resolve().parent.parent / "links" / "nvidia_h200.json"
MIB = 2**20


def alone_us(carrier: Carrier, sent: float) -> float:
    """An exchange of two ranks in which each sends so many bytes, on the links of the table."""
    links = link_table().links()
    t = group([16, 16], links)
    rows = Rows(max(round(sent / 16), 1), home=False)
    whole = carrier.transport.whole_slots
    # Without whole slots a rank sends 16 rows less the few that have no expert at the other.
    scale = 1.0 if whole else 16 / float(t.near)
    flight = flight_of(Rows(round(rows.bytes * scale), home=False), t, links, carrier, fixed(boundary_us=0.0))
    return max(flight.call_us + float(flight.us.max()) + flight.latency_us, flight.floor_us)


@pytest.mark.parametrize(
    ("name", "ctas", "sent", "measured", "within"),
    [
        ("copy_engine", 0, 4 * MIB, 16, 0.11),
        ("copy_engine", 0, 16 * MIB, 50, 0.02),
        ("copy_engine", 0, 64 * MIB, 178, 0.02),
        ("copy_engine", 0, 256 * MIB, 699, 0.02),
        ("push", 132, 16.8e6, 58, 0.06),
        ("push", 8, 64 * MIB, 64 * MIB / 230e3, 0.02),
        ("push", 16, 64 * MIB, 64 * MIB / 288e3, 0.03),
        ("push", 132, 64 * MIB, 64 * MIB / 336e3, 0.03),
        ("distributed", 32, 16 * MIB, 93, 0.02),
        ("distributed", 32, 64 * MIB, 273, 0.05),
        ("distributed", 32, 256 * MIB, 933, 0.01),
        ("distributed", 32, 1e3, 48, 0.001),
    ],
)
def test_transports_take_what_was_measured(name: str, ctas: int, sent: float, measured: float, within: float):
    carrier = Carrier(link_table().transports[name], ctas)
    assert alone_us(carrier, sent) == pytest.approx(measured, rel=within)


def test_few_bytes_go_with_their_flags_and_many_by_the_copy_engine():
    table = link_table()
    carriers = {name: Carrier(each, max(each.shares)) for name, each in table.transports.items()}

    def fastest(sent: float) -> str:
        return min(carriers, key=lambda name: alone_us(carriers[name], sent))

    assert fastest(1e4) == "fused"
    assert fastest(1e6) == "push"
    assert fastest(1e8) == "copy_engine"


def test_every_number_says_where_it_comes_from():
    for transport in link_table().transports.values():
        assert len(transport.origins) >= 3
        for key, origin in transport.origins.items():
            assert origin.partition(":")[0] in ("measured", "fitted", "derived", "assumed"), (transport.name, key)


def test_a_slower_link_slows_in_proportion():
    carrier = Carrier(link_table().transports["push"], 132)
    t = group([4096, 4096], Links(400.0, 0.0))
    rows = Rows(4096, home=False)
    fast = flight_of(rows, t, Links(400.0, 0.0), carrier, fixed())
    slow = flight_of(rows, t, Links(100.0, 0.0), carrier, fixed())
    assert torch.allclose(slow.us, 4 * fast.us)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.pop("link_gbs"), "link_gbs"),
        (lambda data: data.update(transports={}), "no transport"),
        (lambda data: data["transports"]["push"].update(call_us=[-1, "measured: so"]), "push.call_us is -1"),
        (lambda data: data["transports"]["push"].update(call_us=[True, "measured: so"]), "push.call_us is True"),
        (lambda data: data["transports"]["push"].update(call_us=[1.0, ""]), "does not say where it comes from"),
        (lambda data: data["transports"]["push"]["beside"].pop("8"), "different numbers of CTAs"),
        (lambda data: data["transports"]["push"]["beside"].update({"8": [1.5, "measured: so"]}), "beside.8. is 1.5"),
        (lambda data: data["transports"]["push"].update(rates_gbs={}, beside={}), "rates_gbs is empty"),
        (lambda data: data["transports"]["push"].update(packs=1), "push.packs is 1"),
        (lambda data: data["transports"]["push"].update(speed=[1, "measured: so"]), "unknown entries: speed"),
    ],
)
def test_a_file_that_is_no_table(tmp_path, change, text: str):
    data = json.loads(SHIPPED.read_text())
    change(data)
    path = tmp_path / "links.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=text) as raised:
        load_links(path)
    assert str(path) in str(raised.value)


def test_a_file_that_is_no_json(tmp_path):
    path = tmp_path / "links.json"
    path.write_text("[" * 10)
    with pytest.raises(ValueError, match="is no table of links"):
        load_links(path)


def test_nodes_of_a_group():
    links = Links(400.0, 3.0, node=8, node_gbs=50.0)
    assert [links.nodes(ranks) for ranks in (1, 8, 9, 64)] == [1, 1, 2, 8]
    assert not links.several(8) and links.several(9)
    assert not Links(FAST, 0.0).several(4096)

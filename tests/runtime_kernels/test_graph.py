"""A chain's launches as one graph: what its nodes are told, when, and what is left to launches one by one."""

from __future__ import annotations

import gc

import pytest

from moe_compiler.runtime_kernels import cuda_driver as cuda
from moe_compiler.runtime_kernels.chain import direct
from moe_compiler.runtime_kernels.chain.graph import prepare_graph
from tests.runtime_kernels.fake_driver import CONSTANT, Driver, Kernel, boxed_launches, described, two_launches, word

ADDRESSES = [0x7F00_0000_1000, 0x7F00_0000_2000, 0x7F00_0000_3000]


@pytest.fixture
def driver(monkeypatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(cuda, "function", found.function)
    return found


@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
def test_one_launch_runs_all_kernels_with_the_addresses_of_the_run(driver, backwards):
    driver.backwards = backwards
    run = prepare_graph(direct.prepare(two_launches(driver), 3))
    assert run is not None and not driver.launches and not driver.graphs
    run(ADDRESSES, 21)
    a, b, c = map(word, ADDRESSES)
    assert driver.graphs == [(21, [[CONSTANT, a, c, word(3, 4)], [b, b, word(0)]])]
    assert not driver.launches and driver.updates == 2


def test_descriptors_of_activations_follow_the_addresses_of_the_run(driver):
    run = prepare_graph(direct.prepare(boxed_launches(driver), 2))
    for addresses in (ADDRESSES[:2], [512, 1024]):
        run(addresses, 21)
        a, b = addresses
        assert driver.graphs[-1] == (21, [[word(a), CONSTANT, described(b)], [described(a)]])


def test_nodes_are_told_anew_only_when_an_address_has_changed(driver):
    run = prepare_graph(direct.prepare(two_launches(driver), 3))
    run(ADDRESSES, 21)
    run(list(ADDRESSES), 22)
    assert driver.updates == 2 and [stream for stream, _ in driver.graphs] == [21, 22]
    moved = [ADDRESSES[0], ADDRESSES[1], ADDRESSES[2] + 512]
    run(moved, 22)
    assert driver.updates == 4
    assert driver.graphs[-1][1][0][2] == word(moved[2])


def test_launches_one_by_one_do_not_disturb_the_graph(driver):
    one_by_one = direct.prepare(two_launches(driver), 3)
    run = prepare_graph(one_by_one)
    run(ADDRESSES, 21)
    one_by_one([16, 32, 48], 22)
    run(ADDRESSES, 21)
    assert driver.graphs[0] == driver.graphs[1]


def test_two_launches_of_one_kernel_are_told_apart_by_their_addresses(driver):
    same = Kernel(11, [8, 8])
    driver.kernels, driver.backwards = {11: same}, True
    launches = [
        direct.Launch(lambda at, stream, n=n: same.launched_by_triton(driver, at[n], 5), 11, [n], pdl=bool(n))
        for n in range(2)
    ]
    run = prepare_graph(direct.prepare(launches, 2))
    run([64, 128], 0)
    assert driver.graphs == [(0, [[word(64), word(5)], [word(128), word(5)]])]


def test_a_refused_update_is_told_and_tried_again(driver):
    run = prepare_graph(direct.prepare(two_launches(driver), 3))
    driver.answer = 701
    with pytest.raises(cuda.DriverError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        run(ADDRESSES, 21)
    driver.answer = 0
    run(ADDRESSES, 21)
    assert driver.graphs[-1][1][1][0] == word(ADDRESSES[1])


@pytest.mark.parametrize("fault", ["a node more", "other parameters", "no graphs"])
def test_what_cannot_be_matched_stays_with_launches_one_by_one(driver, monkeypatch, fault):
    one_by_one = direct.prepare(two_launches(driver), 3)
    if fault == "a node more":
        monkeypatch.setattr(cuda, "nodes_of", lambda graph: [9, 10, 10])
    elif fault == "other parameters":
        monkeypatch.setattr(cuda, "nodes_of", lambda graph: [9, 9])
    else:

        def missing(name):
            if name == "cuGraphInstantiateWithFlags":
                raise cuda.DriverError("older")
            return driver.function(name)

        monkeypatch.setattr(cuda, "function", missing)
    assert prepare_graph(one_by_one) is None
    assert not driver.open and not driver.capturing


def test_a_graph_is_given_back(driver):
    run = prepare_graph(direct.prepare(two_launches(driver), 3))
    assert sorted(driver.open) == ["executable", "graph"]
    del run
    gc.collect()
    assert not driver.open

"""Launches by the driver alone, on a driver that notes what it is told: what a kernel would read is what was meant."""

from __future__ import annotations

import ctypes

import pytest

from moe_compiler.runtime_kernels import cuda_driver as cuda
from moe_compiler.runtime_kernels.chain import direct
from tests.runtime_kernels.fake_driver import CONSTANT, Driver, boxed_launches, described, two_launches, word


@pytest.fixture
def driver(monkeypatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(cuda, "function", found.function)
    return found


def test_a_launch_reads_the_addresses_of_its_run_and_the_constants_of_the_first(driver):
    run = direct.prepare(two_launches(driver), 3)
    assert run is not None and not driver.launches and not driver.open
    for addresses, stream in ([0x7F00_0000_1000, 0x7F00_0000_2000, 0x7F00_0000_3000], 21), ([16, 32, 48], 22):
        driver.launches.clear()
        run(addresses, stream)
        a, b, c = map(word, addresses)
        assert driver.launches == [
            (11, 5, stream, False, [CONSTANT, a, c, word(3, 4)]),
            (12, 7, stream, True, [b, b, word(0)]),
        ]


def test_descriptors_of_activations_follow_the_addresses_of_the_run(driver):
    run = direct.prepare(boxed_launches(driver), 2)
    assert run is not None
    for addresses in ([0x7F00_0000_1000, 0x7F00_0000_2000], [512, 1024]):
        driver.launches.clear()
        run(addresses, 21)
        assert [launch[-1] for launch in driver.launches] == [
            [word(addresses[0]), CONSTANT, described(addresses[1])],
            [described(addresses[0])],
        ]


@pytest.mark.parametrize("number", [0, 2], ids=["one that stays", "one that is not there"])
def test_a_descriptor_that_is_not_of_its_slot_is_left_to_triton(driver, number):
    assert direct.prepare(boxed_launches(driver, number), 2) is None
    assert not driver.launches and not driver.open


def test_an_address_that_no_descriptor_takes_is_told(driver):
    run = direct.prepare(boxed_launches(driver), 2)
    driver.answer = 1
    with pytest.raises(cuda.DriverError, match="give a tensor descriptor its address"):
        run([512, 1024], 0)
    assert not driver.launches


def test_marks_are_no_addresses_of_memory_but_ones_that_a_descriptor_takes():
    marks = [direct.mark(slot) for slot in range(300)]
    assert [direct.slot_of(value) for value in marks] == [*range(300)]
    assert all(1 << 48 < value < 1 << 57 and value % 16 == 0 for value in marks)
    assert direct.slot_of(0x7F00_0000_1000) is None and direct.slot_of(0) is None


def test_constants_are_aligned_as_descriptors_must_be(driver, monkeypatch):
    run = direct.prepare(two_launches(driver), 3)
    seen = []
    launch = driver.cuLaunchKernelEx
    run._launch = lambda config, function, pointers, extra: (
        seen.append(list(pointers)) or launch(config, function, pointers, extra)
    )
    run([1, 2, 3], 0)
    assert seen[0][0] % 128 == 0 and seen[0][3] % 64 == 0


def test_the_driver_s_refusal_says_which_launch_and_why(driver):
    run = direct.prepare(two_launches(driver), 3)
    driver.answer = 701
    with pytest.raises(cuda.DriverError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        run([1, 2, 3], 0)
    assert run.launching == 0 and len(driver.launches) == 1


@pytest.mark.parametrize("fault", ["cluster", "other slots", "two nodes", "old driver", "make fails"])
def test_what_the_driver_does_not_tell_is_left_to_triton(driver, monkeypatch, fault):
    launches = two_launches(driver)
    if fault == "cluster":
        driver.kernels[12].cluster = 2
    elif fault == "other slots":
        launches[1] = direct.Launch(launches[1].make, 12, [1, 2], pdl=True)
    elif fault == "two nodes":
        monkeypatch.setattr(cuda, "nodes_of", lambda graph: [9, 10])
    elif fault == "make fails":

        def fails(addresses, stream):
            raise RuntimeError("no descriptor")

        launches[1] = direct.Launch(fails, 12, [1, 1], pdl=True)
    else:

        def missing(name):
            if name == "cuFuncGetParamInfo":
                raise cuda.DriverError("older")
            return driver.function(name)

        monkeypatch.setattr(cuda, "function", missing)
    assert direct.prepare(launches, 3) is None
    assert not driver.launches and not driver.open and not driver.capturing


def test_without_a_driver_nothing_is_prepared(monkeypatch):
    cuda._library.cache_clear()
    cuda.function.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError("not found")))
    assert direct.prepare([direct.Launch(lambda addresses, stream: None, 1, [], pdl=False)], 0) is None
    with pytest.raises(cuda.DriverError, match="cannot be loaded"):
        cuda.function("cuLaunchKernelEx")
    cuda._library.cache_clear()
    cuda.function.cache_clear()

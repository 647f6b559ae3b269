"""Launches by the driver alone, on a driver that notes what it is told: what a kernel would read is what was meant."""

from __future__ import annotations

import ctypes

import pytest

from moe_compiler.runtime_kernels import cuda_driver as cuda
from moe_compiler.runtime_kernels.chain import direct

CONSTANT = bytes(range(100, 228))  # as large as a tensor descriptor


class Kernel:
    """What a compiled kernel takes: sizes of its parameters; `values` are those of the launch that is being made."""

    def __init__(self, handle: int, sizes: list[int], programs: int = 5, cluster: int = 0) -> None:
        self.handle, self.sizes, self.programs, self.cluster = handle, sizes, programs, cluster

    def launched_by_triton(self, driver: Driver, *values: int | bytes) -> None:
        assert driver.capturing, "nothing may be executed while launches are prepared"
        raw = [
            v if isinstance(v, bytes) else v.to_bytes(size, "little")
            for v, size in zip(values, self.sizes, strict=True)
        ]
        driver.node = (self, [ctypes.create_string_buffer(value, len(value)) for value in raw])


class Driver:
    """libcuda, as far as it is called."""

    def __init__(self) -> None:
        self.kernels: dict[int, Kernel] = {}
        self.node: tuple[Kernel, list[ctypes.Array]] | None = None
        self.capturing = False
        self.open: list[str] = []
        self.launches: list[tuple[int, int, int | None, bool, list[bytes]]] = []
        self.answer = 0
        self.pointers: list[object] = []

    def function(self, name: str):
        return getattr(self, name)

    def cuStreamCreate(self, stream, flags):
        stream._obj.value = 77
        self.open.append("stream")
        return 0

    def cuStreamDestroy_v2(self, stream):
        self.open.remove("stream")
        return 0

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert stream.value == 77 and mode.value == 2
        self.capturing = True
        return 0

    def cuStreamEndCapture(self, stream, graph):
        self.capturing = False
        graph._obj.value = 5
        self.open.append("graph")
        return 0

    def cuGraphDestroy(self, graph):
        self.open.remove("graph")
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):
        count._obj.value = 1
        if nodes is not None:
            nodes[0] = 9
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, params):
        kernel, values = self.node
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        self.pointers.append(pointers)
        read = params._obj
        read.grid[:], read.block[:], read.shared = [kernel.programs, 1, 1], [128, 1, 1], 4096
        read.parameters = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, attribute, value):
        value._obj[0] = self.node[0].cluster if attribute.value == 4 else 0
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        sizes = self.kernels[function.value].sizes
        if index.value >= len(sizes):
            return 1
        size._obj.value = sizes[index.value]
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        config = config._obj
        sizes = self.kernels[function.value].sizes
        assert tuple(config.block) == (128, 1, 1) and config.shared == 4096 and extra is None
        pdl = bool(config.count) and config.attributes[0].id == 6 and config.attributes[0].value[0] == 1
        read = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        self.launches.append((function.value, config.grid[0], config.stream, pdl, read))
        return self.answer

    def cuGetErrorName(self, status, text):
        text._obj.value = b"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
        return 0


@pytest.fixture
def driver(monkeypatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(cuda, "function", found.function)
    return found


def two_launches(driver: Driver) -> list[direct.Launch]:
    """A descriptor, slots 0 and 2, a number of four bytes; then slot 1 twice and a null."""
    first, second = Kernel(11, [128, 8, 8, 4]), Kernel(12, [8, 8, 8], programs=7)
    driver.kernels = {11: first, 12: second}

    def make_first(addresses, stream):
        first.launched_by_triton(driver, CONSTANT, addresses[0], addresses[2], 3)

    def make_second(addresses, stream):
        second.launched_by_triton(driver, addresses[1], addresses[1], 0)

    return [direct.Launch(make_first, 11, [2, 0], pdl=False), direct.Launch(make_second, 12, [1, 1], pdl=True)]


def word(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def test_a_launch_reads_the_addresses_of_its_run_and_the_constants_of_the_first(driver):
    run = direct.prepare(two_launches(driver), 3)
    assert run is not None and not driver.launches and not driver.open
    for addresses, stream in ([0x7F00_0000_1000, 0x7F00_0000_2000, 0x7F00_0000_3000], 21), ([16, 32, 48], 22):
        driver.launches.clear()
        driver.node = None
        run(addresses, stream)
        a, b, c = map(word, addresses)
        assert driver.launches == [
            (11, 5, stream, False, [CONSTANT, a, c, word(3, 4)]),
            (12, 7, stream, True, [b, b, word(0)]),
        ]


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

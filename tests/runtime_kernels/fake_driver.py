"""A driver that notes what it is told: launches, captures and graphs, as far as chains make use of them."""

from __future__ import annotations

import ctypes

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
        driver.nodes.append((self, [ctypes.create_string_buffer(value, len(value)) for value in raw]))


class Driver:
    """libcuda, as far as it is called."""

    def __init__(self) -> None:
        self.kernels: dict[int, Kernel] = {}
        # The nodes of the graph that was captured last: kernels with the memory of their parameters.
        self.nodes: list[tuple[Kernel, list[ctypes.Array]]] = []
        self.backwards = False
        self.executables: list[list[list[bytes]]] = []
        self.capturing = False
        self.open: list[str] = []
        self.launches: list[tuple[int, int, int | None, bool, list[bytes]]] = []
        self.graphs: list[tuple[int, list[list[bytes]]]] = []
        self.updates = 0
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
        self.nodes = []
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
        """Node i has the handle 9 + i; told backwards where `backwards` says so."""
        count._obj.value = len(self.nodes)
        if nodes is not None:
            handles = range(9, 9 + len(self.nodes))
            nodes[:] = list(reversed(handles)) if self.backwards else list(handles)
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, params):
        kernel, values = self.nodes[node.value - 9]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        self.pointers.append(pointers)
        read = params._obj
        read.grid[:], read.block[:], read.shared = [kernel.programs, 1, 1], [128, 1, 1], 4096
        read.parameters = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        read.func = kernel.handle
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, attribute, value):
        value._obj[0] = self.nodes[node.value - 9][0].cluster if attribute.value == 4 else 0
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
        if self.capturing:
            memory = [ctypes.create_string_buffer(value, len(value)) for value in read]
            self.nodes.append((self.kernels[function.value], memory))
            return 0
        self.launches.append((function.value, config.grid[0], config.stream, pdl, read))
        return self.answer

    def cuGraphInstantiateWithFlags(self, executable, graph, flags):
        assert graph.value == 5 and flags.value == 0
        self.executables.append([[bytes(value) for value in values] for _, values in self.nodes])
        executable._obj.value = 100 + len(self.executables)
        self.open.append("executable")
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable, node, params):
        told, (kernel, _) = params._obj, self.nodes[node.value - 9]
        assert told.func == kernel.handle and told.grid[0] == kernel.programs and told.shared == 4096
        read = [ctypes.string_at(told.parameters[n], size) for n, size in enumerate(kernel.sizes)]
        self.executables[executable.value - 101][node.value - 9] = read
        self.updates += 1
        return self.answer

    def cuGraphLaunch(self, executable, stream):
        self.graphs.append((stream.value or 0, list(self.executables[executable.value - 101])))
        return self.answer

    def cuGraphExecDestroy(self, executable):
        self.open.remove("executable")
        return 0

    def cuTensorMapReplaceAddress(self, descriptor, address):
        """A descriptor begins with the address of what it describes."""
        if not self.answer:
            ctypes.c_uint64.from_address(descriptor.value).value = address.value
        return self.answer

    def cuGetErrorName(self, status, text):
        text._obj.value = b"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
        return 0


def two_launches(driver: Driver) -> list[direct.Launch]:
    """A descriptor, slots 0 and 2, a number of four bytes; then slot 1 twice and a null."""
    first, second = Kernel(11, [128, 8, 8, 4]), Kernel(12, [8, 8, 8], programs=7)
    driver.kernels = {11: first, 12: second}

    def make_first(addresses, stream):
        first.launched_by_triton(driver, CONSTANT, addresses[0], addresses[2], 3)

    def make_second(addresses, stream):
        second.launched_by_triton(driver, addresses[1], addresses[1], 0)

    return [direct.Launch(make_first, 11, [2, 0], pdl=False), direct.Launch(make_second, 12, [1, 1], pdl=True)]


def described(address: int) -> bytes:
    """A tensor descriptor of memory there."""
    return word(address) + CONSTANT[8:]


def boxed_launches(driver: Driver, number: int = 1) -> list[direct.Launch]:
    """Slot 0, a descriptor that stays, one of slot 1; then one of slot 0. number: which one is said to be of slot 1."""
    first, second = Kernel(11, [8, 128, 128]), Kernel(12, [128])
    driver.kernels = {11: first, 12: second}

    def make_first(addresses, stream):
        first.launched_by_triton(driver, addresses[0], CONSTANT, described(addresses[1]))

    def make_second(addresses, stream):
        second.launched_by_triton(driver, described(addresses[0]))

    return [
        direct.Launch(make_first, 11, [0], pdl=False, boxes=[(number, 1)]),
        direct.Launch(make_second, 12, [], pdl=True, boxes=[(0, 0)]),
    ]


def word(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")

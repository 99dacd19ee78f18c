"""A CUDA driver without a GPU: its entry points, on memory of this process, for :func:`kvplan.cuda.use`.

What is put on a stream waits there. Whoever asks for an event lets streams go on, in an order that a seed draws: one
stream runs ahead of the others for a while. So a wait that is missing between two streams shows as wrong bytes, for
some seeds. The copies of a batch, and the rows of a kernel, have no order either.
"""

# the names of CUDA

from __future__ import annotations

import ctypes
import gc
import inspect
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_uint64, memmove
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvplan.cuda.driver import IpcHandle
from tests.simulated.ipc import SharedMemory
from tests.simulated.kernel import kernel, words

SUCCESS, INVALID, NOT_READY, LOST, NOT_SUPPORTED, UNKNOWN = 0, 1, 600, 700, 801, 999
DEVICES, HOST = 2, 1  # CUmemorytype
LEAST_IN_A_BATCH = 24 << 10  # bytes: drivers lose smaller copies from host memory (H200, driver 580)
LARGE = 16 << 20  # bytes of an allocation that is not filled, which would take long
CHANGES = 0.05  # how likely another stream gets ahead at a step
PATIENCE = 120.0  # seconds
CONTEXT = 0xC0  # handle of the first GPU's context

KEPT = ("cuCtx", "cuThread", "cuDevice", "cuGet")  # beginnings of calls that need no context
ATTRIBUTES = {11: 2**31 - 1, 16: 132, 75: 9, 76: 0}  # CUdevice_attribute: pitch, SMs, compute capability


class Gate:
    """Holds up a stream until it is opened."""

    def __init__(self) -> None:
        self.shut = True

    def open(self) -> None:
        self.shut = False


class SimulatedDriver(SharedMemory):
    """A library with the entry points that executors call. Each is a ctypes function that calls a method of its name.

    Args:
        gpus: number of GPUs, which reach one another.
        seed: of the order in which streams go on.

    Attributes:
        mistakes: what calls and their work have found wrong. A test looks at it at its end.
        capturing: handles of streams in capture.
        lost: whether the context is lost: from then on, every call returns an error.
        slow: calls that take a millisecond.
        unreachable: pairs of GPUs of which the first cannot reach the second one's memory.
    """

    def __init__(self, gpus: int = 1, seed: int = 0) -> None:
        super().__init__()
        self.gpus = self.visible = gpus
        self.mistakes: list[BaseException] = []
        self.capturing: set[int] = set()
        self.lost = False
        self.slow: set[str] = set()
        self.unreachable: set[tuple[int, int]] = set()
        self._reached = {(gpu, gpu) for gpu in range(gpus)}
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._here = threading.local()  # `context` of the thread, and its capture `mode`
        self._handles = iter(range(1000, 1 << 40))
        self._streams: dict[int, deque[Callable[[], bool]]] = {k: deque() for k in range(gpus)}  # default ones first
        self._owners: dict[int, int] = {k: k for k in range(gpus)}  # the GPU of each stream and event
        self._ranks: dict[int, float] = {}  # of streams: the lowest goes first
        self._recorded: dict[int, int] = {}  # of events: number of the last record, and of the last that has passed
        self._passed: dict[int, int] = {}
        self._gates: list[Gate] = []
        self._ranges: list[tuple[int, int, int | None]] = []  # first and last address, and GPU: None for pinned memory
        self._kept: list[np.ndarray] = []  # so that no other memory gets their addresses
        self._allocated: dict[int, np.ndarray] = {}
        self._modules: dict[int, Any] = {}
        self._faults: dict[str, list[int]] = {}
        self._theirs: set[int] = set()  # streams and events that are not kvplan's
        self._names: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.calls: list[str] = []
        for name in [name for name in dir(type(self)) if name.startswith("cu")]:
            method = getattr(self, name)
            kinds = [IpcHandle if one.annotation == "IpcHandle" else c_size_t
                     for one in inspect.signature(method).parameters.values()]  # fmt: skip
            setattr(self, name, self._entry(name, method, kinds))

    def __getattr__(self, name: str) -> Any:
        """Entry points that no test calls exist, too: kvplan looks up all of them."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        return vars(self).setdefault(name, self._entry(name, lambda *_: NOT_SUPPORTED, [c_size_t] * 9))

    def _entry(self, name: str, method: Callable[..., int], kinds: list[Any]) -> Any:
        def call(*arguments: int) -> int:
            try:
                self.calls.append(name)
                if name in self.slow:
                    time.sleep(1e-3)
                codes = self._faults.get(name)
                code = codes.pop(0) if codes else SUCCESS
                if self.lost and not name.startswith(KEPT):
                    return LOST
                return code or method(*arguments) or SUCCESS
            except BaseException as error:  # C code has called
                self.mistakes.append(error)
                return UNKNOWN

        return ctypes.CFUNCTYPE(c_int, *kinds)(call)

    def compile_kernel(self, shape: Any, arch: int) -> SimpleNamespace:
        """A kernel that is not compiled: its image is its shape, in words."""
        assert arch == 90
        image = " ".join(str(int(number)) for number in shape).encode()
        return SimpleNamespace(image=image, name="copy_rows", shared=0, threads=32 * shape.warps, shape=shape)

    # For tests: memory, streams and failures.

    def pin(self, array: np.ndarray) -> None:
        """Let all GPUs reach an array of host memory."""
        self.own(array, None)

    def own(self, array: np.ndarray, gpu: int | None) -> None:
        """Make an array the memory of a GPU."""
        address = array.__array_interface__["data"][0]
        self._ranges.append((address, address + array.nbytes, gpu))
        self._kept.append(array)

    def stream(self, gpu: int = 0) -> int:
        """Make a stream of the caller's."""
        with self._lock:
            made = next(self._handles)
            self._streams[made], self._owners[made] = deque(), gpu
            self._theirs.add(made)
        return made

    def event(self, stream: int) -> int:
        """Make an event of the caller's, recorded on a stream."""
        with self._lock:
            made = next(self._handles)
            self._owners[made], self._recorded[made], self._passed[made] = self._owners[stream], 0, 0
            self._theirs.add(made)
        assert self._record(made, stream) == SUCCESS
        return made

    def drop(self, event: int) -> None:
        """Destroy an event of the caller's: from now on, no stream may wait for it."""
        with self._lock:
            self._recorded.pop(event)

    def put(self, stream: int, work: Callable[[], object]) -> None:
        """Put work on a stream."""

        def works() -> bool:
            try:
                work()
            except BaseException as error:  # in whichever thread lets streams go on
                self.mistakes.append(error)
            return True

        with self._lock:
            self._streams[stream].append(works)

    def gate(self, stream: int) -> Gate:
        """Hold a stream up."""
        made = Gate()
        with self._lock:
            self._gates.append(made)
            self._streams[stream].append(lambda: not made.shut)
        return made

    def fail(self, call: str, *, spare: int = 0, code: int = UNKNOWN) -> None:
        """Let a call return an error once, after ``spare`` calls that do not."""
        self._faults[call] = [SUCCESS] * spare + [code]

    def failed(self, call: str) -> bool:
        """Whether the call that was to fail has been made. Afterwards none is to fail."""
        return not self._faults.pop(call)

    def finish(self) -> None:
        """Let streams do everything that can be done."""
        with self._lock:
            while self._advance(64):
                pass

    def left(self) -> dict[str, int]:
        """What kvplan holds: streams, events, bytes of memory and modules. Nothing, once it is closed."""
        if self.lost:
            return {}  # with the context, everything in it
        with self._lock:
            mine = set(self._owners) - self._theirs - set(range(self.gpus))
            events = mine & set(self._recorded)
            held = {
                "streams": len(mine - events), "events": len(events), "modules": len(self._modules),
                "bytes": sum(array.nbytes for array in self._allocated.values()),
            }  # fmt: skip
        return {name: count for name, count in held.items() if count} | self.shared()

    def forgive(self) -> None:
        """Forget what an interrupt lost, between the call that made it and its return: a handle, or memory."""
        with self._lock:
            lost = set(self._owners) - self._theirs - set(range(self.gpus))
            assert len(lost) + len(self._allocated) + len(self._modules) <= 1, (lost, self._allocated, self._modules)
            self._theirs |= lost
            self._allocated.clear()
            self._modules.clear()

    # Time: what streams do, and in which order.

    def _advance(self, steps: int) -> int:
        """Let streams do their next things, and return how many were done. The lock is held.

        Even turns would hardly ever starve a stream, which is what shows that another does not wait for it.
        """
        done, drawn = 0, self._random
        for _ in range(steps):
            waiting = [stream for stream, queue in self._streams.items() if queue]
            if waiting and drawn.random() < CHANGES:
                self._ranks[drawn.choice(waiting)] = drawn.random()
            for stream in sorted(waiting, key=lambda stream: self._ranks.setdefault(stream, drawn.random())):
                queue = self._streams[stream]
                if queue[0]():
                    queue.popleft()
                    done += 1
                    break
            else:
                break
        return done

    def _record(self, event: int, stream: int) -> int:
        assert self._owners[event] == self._owners[stream], "a GPU records its own events on its own streams"
        with self._lock:
            self._recorded[event] = number = self._recorded[event] + 1

            def passes() -> bool:
                self._passed[event] = max(self._passed.get(event, 0), number)
                return True

            self._streams[stream].append(passes)
        return SUCCESS

    def wait_until(self, event: int) -> int:
        """Block until an event has passed; behind a gate, until somebody opens it."""
        end = time.monotonic() + PATIENCE
        number = self._recorded[event]
        while True:
            with self._lock:
                if self._passed[event] >= number:
                    return SUCCESS
                done = self._advance(1)
                assert done or any(gate.shut for gate in self._gates), "the streams wait for each other"
            if not done:
                assert time.monotonic() < end, "nobody opened the gate"
                time.sleep(1e-3)

    def _stream(self, handle: int) -> int:
        """The key of a stream: small handles are the default stream of the current context."""
        return self._gpu if handle < 3 else handle

    @property
    def _gpu(self) -> int:
        context = getattr(self._here, "context", 0)
        assert context, "no context is current"
        return context - CONTEXT

    # Memory.

    def _range(self, address: int) -> tuple[int, int, int | None] | None:
        return next((one for one in self._ranges if one[0] <= address < one[1]), None)

    def _reach(self, gpu: int, address: int) -> None:
        known = self._range(address)
        assert known is not None, f"a kernel of GPU {gpu} reaches pageable memory at {address:#x}"
        assert known[2] is None or (gpu, known[2]) in self._reached, f"GPU {gpu} does not reach that of {known[2]}"

    def _allocate(self, nbytes: int, gpu: int | None) -> int:
        make = np.zeros if nbytes > LARGE else lambda size, kind: np.full(size, 0xDD, kind)
        array = make(nbytes + 512, np.uint8)
        address = -(-array.__array_interface__["data"][0] // 256) * 256
        with self._lock:
            self._allocated[address] = array
            self._ranges.append((address, address + nbytes, gpu))
        return address

    def _free(self, address: int) -> int:
        with self._lock:
            if self._allocated.pop(address, None) is None:
                return INVALID
            self._ranges = [one for one in self._ranges if one[0] != address]
        return SUCCESS

    # The entry points: the GPUs.

    def cuInit(self, flags: int) -> int:
        return SUCCESS

    def cuDriverGetVersion(self, out: int) -> None:
        c_int.from_address(out).value = 13000

    def cuDeviceGetCount(self, out: int) -> None:
        c_int.from_address(out).value = self.visible

    def cuDeviceGet(self, out: int, ordinal: int) -> None:
        c_int.from_address(out).value = ordinal

    def cuDeviceGetAttribute(self, out: int, which: int, handle: int) -> None:
        c_int.from_address(out).value = ATTRIBUTES[which]

    def cuDeviceGetName(self, out: int, room: int, handle: int) -> None:
        memmove(out, b"Simulated GPU\0", 14)

    def cuDeviceCanAccessPeer(self, out: int, gpu: int, peer: int) -> None:
        c_int.from_address(out).value = int((gpu, peer) not in self.unreachable)

    def cuDevicePrimaryCtxRetain(self, out: int, handle: int) -> None:
        c_uint64.from_address(out).value = CONTEXT + handle

    def cuCtxGetCurrent(self, out: int) -> None:
        c_uint64.from_address(out).value = getattr(self._here, "context", 0)

    def cuCtxSetCurrent(self, context: int) -> None:
        self._here.context = context

    def cuCtxEnablePeerAccess(self, context: int, flags: int) -> None:
        self._reached.add((self._gpu, context - CONTEXT))

    def cuCtxGetStreamPriorityRange(self, least: int, greatest: int) -> None:
        c_int.from_address(least).value, c_int.from_address(greatest).value = 0, -5

    # Streams and events.

    def cuStreamCreateWithPriority(self, out: int, flags: int, priority: int) -> None:
        c_uint64.from_address(out).value = made = self.stream(self._gpu)
        self._theirs.discard(made)

    def cuStreamDestroy_v2(self, stream: int) -> None:
        with self._lock:
            assert not self._streams.pop(stream), "a stream was destroyed with work on it"
            del self._owners[stream]

    def cuStreamIsCapturing(self, stream: int, out: int) -> None:
        c_int.from_address(out).value = int(stream in self.capturing)

    def cuThreadExchangeStreamCaptureMode(self, cell: int) -> None:
        mode = c_int.from_address(cell)
        mode.value, self._here.mode = getattr(self._here, "mode", 0), mode.value

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        with self._lock:
            number = self._recorded[event]  # what is recorded now, not later
            self._streams[self._stream(stream)].append(lambda: self._passed.get(event, number) >= number)

    def cuEventCreate(self, out: int, flags: int) -> None:
        with self._lock:
            made = next(self._handles)
            self._owners[made], self._recorded[made], self._passed[made] = self._gpu, 0, 0
        c_uint64.from_address(out).value = made

    def cuEventRecord(self, event: int, stream: int) -> int:
        return self._record(event, self._stream(stream))

    def cuEventQuery(self, event: int) -> int:
        with self._lock:
            self._advance(self._random.randrange(4))
            return SUCCESS if self._passed[event] >= self._recorded[event] else NOT_READY

    def cuEventSynchronize(self, event: int) -> int:
        return self.wait_until(event)

    def cuEventElapsedTime(self, out: int, begin: int, end: int) -> None:
        assert min(self._passed[begin], self._passed[end]) > 0
        ctypes.c_float.from_address(out).value = 1e-3

    def cuEventDestroy_v2(self, event: int) -> None:
        with self._lock:
            assert self._recorded.pop(event) == self._passed.pop(event), "an event was destroyed before it passed"
            del self._owners[event]

    # Memory.

    def cuMemAlloc_v2(self, out: int, nbytes: int) -> None:
        c_uint64.from_address(out).value = self._allocate(nbytes, self._gpu)

    def cuMemHostAlloc(self, out: int, nbytes: int, flags: int) -> None:
        c_uint64.from_address(out).value = self._allocate(nbytes, None)

    def cuMemFree_v2(self, address: int) -> int:
        return self._free(address)

    cuMemFreeHost = cuMemFree_v2

    def cuPointerGetAttribute(self, out: int, which: int, address: int) -> int:
        known = self._range(address)
        if known is None:
            return INVALID
        first, last, gpu = known
        in_piece = self.in_piece(address) is not None
        facts = {
            2: HOST if gpu is None else DEVICES, 3: address, 10: int(not in_piece), 11: first, 12: last - first,
            14: int(in_piece), 16: 3, 17: 0,
        }  # fmt: skip
        if which not in facts:
            return NOT_SUPPORTED
        c_uint64.from_address(out).value = facts[which]
        return SUCCESS

    # Work.

    def cuMemcpyAsync(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.put(self._stream(stream), lambda: memmove(dst, src, nbytes))

    def cuMemcpyBatchAsync(
        self, dst: int, src: int, size: int, count: int, attributes: int, first: int, kinds: int, failed: int,
        stream: int,
    ) -> None:  # fmt: skip
        columns = [words(at, count).tolist() for at in (dst, src, size)]  # read by the call, not later
        assert kinds == 1
        for source, nbytes in zip(*columns[1:], strict=True):
            on_a_gpu = (self._range(source) or (0, 0, None))[2] is not None
            assert on_a_gpu or nbytes >= LEAST_IN_A_BATCH, f"drivers lose {nbytes} bytes of host memory in a batch"
        moves = list(zip(*columns, strict=True))
        self._random.shuffle(moves)
        self.put(stream, lambda: [memmove(*move) for move in moves])

    def cuMemcpy2DAsync_v2(self, parameters: int, stream: int) -> int:
        row = words(parameters, 16).tolist()
        src, src_pitch, dst, dst_pitch, width, height = (row[k] for k in (4, 6, 11, 13, 14, 15))
        assert width <= min(src_pitch, dst_pitch)
        for at, pitch in ((src, src_pitch), (dst, dst_pitch)):
            if self._range(at) != self._range(at + (height - 1) * pitch):
                return INVALID
        self.put(stream, lambda: [memmove(dst + k * dst_pitch, src + k * src_pitch, width) for k in range(height)])
        return SUCCESS

    def cuModuleLoadData(self, out: int, image: int) -> None:
        from kvplan.execute.gpu.resources import Shape

        made = next(self._handles)
        self._modules[made] = Shape(*map(int, ctypes.string_at(image).split()))
        c_uint64.from_address(out).value = made

    def cuModuleGetFunction(self, out: int, module: int, name: int) -> None:
        c_uint64.from_address(out).value = module

    def cuModuleUnload(self, module: int) -> None:
        del self._modules[module]

    def cuLaunchKernelEx(self, config: int, function: int, arguments: int, extra: int) -> None:
        programs, threads = (ctypes.c_uint32.from_address(config + at).value for at in (0, 12))
        stream = self._stream(c_uint64.from_address(config + 32).value)
        shape, gpu = self._modules[function], self._owners[stream]
        assert programs > 0
        assert threads == 32 * shape.warps
        header = c_uint64.from_address(c_uint64.from_address(arguments).value).value
        self.put(stream, lambda: kernel(header, shape, self._random, lambda address: self._reach(gpu, address)))

    # Errors.

    def cuGetErrorName(self, code: int, out: int) -> None:
        name = self._names.setdefault(code, ctypes.create_string_buffer(b"CUDA_ERROR_SIMULATED"))
        c_uint64.from_address(out).value = ctypes.addressof(name)

    cuGetErrorString = cuGetErrorName

    def cuGetProcAddress_v2(self, symbol: int, out: int, version: int, flags: int, status: int) -> None:
        entry = getattr(self, ctypes.string_at(symbol).decode())
        c_uint64.from_address(out).value = ctypes.cast(entry, ctypes.c_void_p).value or 0


@contextmanager
def simulated(gpus: int = 1, seed: int = 0, *, batches: bool = True) -> Iterator[SimulatedDriver]:
    """Hand a simulated driver in, with or without batched copies; afterwards it has found no mistake, and kvplan holds
    nothing of it.
    """
    from kvplan.cuda import use

    driver = SimulatedDriver(gpus, seed)
    if not batches:
        driver.fail("cuGetProcAddress_v2")
    with use(driver):
        yield driver
    for gate in driver._gates:
        gate.open()
    driver.finish()
    if driver.mistakes:
        raise driver.mistakes[0]
    if driver.left():
        gc.collect()  # plans and programs have run tables, until they are gone
    assert not (left := driver.left()), left

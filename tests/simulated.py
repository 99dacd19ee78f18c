"""A GPU that is not there: the driver's calls on CPU memory, in every order that streams and events allow.

What is put on a stream waits there. Asking for an event lets streams advance in random turns until it has passed, so
that a missing wait between two streams shows as wrong bytes, sooner or later. Kernels are carried out as their header
says.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvplan.execute.cuda import DEVICE_POINTER, HOST_MEMORY, MEMORY_TYPE, NOT_READY, RANGE_SIZE, RANGE_START

DEVICE_MEMORY = 2


@dataclass
class Tensor:
    """CPU memory that says it is a GPU's: what kvplan reads of a tensor, and no more."""

    array: np.ndarray
    device: str = "cuda:0"

    def data_ptr(self) -> int:
        return self.array.__array_interface__["data"][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)


@dataclass
class Stream:
    """What `after=` and `wait` are given."""

    cuda_stream: int

    def synchronize(self) -> None:
        raise AssertionError("kvplan blocked the CPU on a stream")


class Driver:
    """The few entry points that are called past the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.cuMemcpyBatchAsync = True

    def cuEventQuery(self, event: int) -> int:
        return self._device.query(event)

    def cuEventSynchronize(self, event: int) -> int:
        self._device.run_until(event)
        return 0

    def cuEventDestroy_v2(self, event: int) -> int:
        return self._device.destroy_event(event)

    def cuStreamDestroy_v2(self, stream: int) -> int:
        return self._device.destroy_stream(stream)

    def cuModuleUnload(self, module: int) -> int:
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode) -> int:
        return 0

    def name(self, code: int) -> str:
        return f"CUDA_ERROR_SIMULATED ({code})"


class Device:
    """Has the methods of `kvplan.execute.cuda.Device`.

    Args:
        seed: of the order in which streams advance.
        eager: whether a query lets streams advance at all; else only blocking does.
    """

    arch = 90
    multiprocessors = 132
    max_pitch = 2**31 - 1

    def __init__(self, seed: int = 0, *, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self.driver = Driver(self)
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: dict[int, deque[Callable[[], bool]]] = {}
        self.recorded: dict[int, int] = {}  # of each event, how often it was recorded
        self.passed: dict[int, int] = {}
        self.capture: set[int] = set()
        self.shapes: dict[int, object] = {}
        self.pinned: list[tuple[int, int]] = []
        self.memory: dict[int, np.ndarray] = {}
        self.handle = 100
        self.broken: str | None = None
        self.calls: list[str] = []

    # Memory.

    def pin(self, array: np.ndarray) -> None:
        address = array.__array_interface__["data"][0]
        self.pinned.append((address, address + array.nbytes))

    def pointer(self, address: int, attribute: int) -> int | None:
        for start, end in self.pinned:
            if start <= address < end:
                known = {
                    MEMORY_TYPE: HOST_MEMORY,
                    DEVICE_POINTER: address,
                    RANGE_START: start,
                    RANGE_SIZE: end - start,
                }
                return known[attribute]
        return None

    def allocate(self, nbytes: int) -> int:
        array = np.full(nbytes + 512, 0xDD, np.uint8)
        address = -(-array.__array_interface__["data"][0] // 256) * 256
        with self.lock:
            self.memory[address] = array
        return address

    def free(self, address: int) -> None:
        with self.lock:
            self.memory.pop(address)

    allocate_host, free_host = allocate, free

    # Streams and events.

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        yield

    def stream(self, *, urgent: bool = False) -> int:
        with self.lock:
            self.handle += 1
            self.streams[self.handle] = deque()
            return self.handle

    def event(self) -> int:
        with self.lock:
            self.handle += 1
            self.recorded[self.handle] = self.passed[self.handle] = 0
            return self.handle

    def destroy_event(self, event: int) -> int:
        with self.lock:
            assert self.recorded.pop(event) == self.passed.pop(event), "an event was destroyed before it passed"
        return 0

    def destroy_stream(self, stream: int) -> int:
        with self.lock:
            assert not self.streams.pop(stream), "a stream was destroyed with work on it"
        return 0

    def record(self, event: int, stream: int) -> None:
        self.check("cuEventRecord")
        with self.lock:
            self.recorded[event] += 1
            number = self.recorded[event]

            def passes() -> bool:
                self.passed[event] = max(self.passed[event], number)
                return True

            self.streams[stream].append(passes)

    def wait(self, stream: int, event: int) -> None:
        self.check("cuStreamWaitEvent")
        with self.lock:
            number = self.recorded[event]  # what is recorded now, not later
            self.streams[stream].append(lambda: self.passed[event] >= number)

    def query(self, event: int) -> int:
        with self.lock:
            self.advance(self.random.randrange(4))
            return 0 if self.passed[event] >= self.recorded[event] else NOT_READY

    def run_until(self, event: int) -> None:
        with self.lock:
            number = self.recorded[event]
            while self.passed[event] < number:
                assert self.advance(1), "the streams wait for each other"

    def run(self) -> None:
        """Everything that was put on streams."""
        with self.lock:
            while self.advance(64):
                pass

    def advance(self, steps: int) -> int:
        """Let random streams do their next thing; how many were done."""
        done = 0
        for _ in range(steps):
            ready = [queue for queue in self.streams.values() if queue]
            self.random.shuffle(ready)
            for queue in ready:
                if queue[0]():
                    queue.popleft()
                    done += 1
                    break
            else:
                return done
        return done

    def seconds(self, begin: int, end: int) -> float:
        assert self.passed[begin] and self.passed[end]
        return 1e-6

    def capturing(self, stream: int) -> bool:
        return stream in self.capture

    # Work.

    def check(self, call: str) -> None:
        self.calls.append(call)
        if self.broken == call:
            from kvplan.execute.cuda import DriverError

            raise DriverError(f"{call} returned CUDA_ERROR_SIMULATED (1)", call, 1, 0)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.check("cuMemcpyAsync")
        self.put(stream, lambda: ctypes.memmove(dst, src, nbytes))

    def copy_batch(self, dst: int, src: int, size: int, count: int, stream: int) -> None:
        self.check("cuMemcpyBatchAsync")
        columns = [words(at, count).tolist() for at in (dst, src, size)]  # read by the call, not later
        moves = list(zip(*columns, strict=True))
        self.random.shuffle(moves)  # copies of a batch have no order
        self.put(stream, lambda: [ctypes.memmove(*move) for move in moves])

    def copy_2d(self, parameters: int, stream: int) -> int:
        self.calls.append("cuMemcpy2DAsync")
        if self.broken == "cuMemcpy2DAsync":
            return 1
        row = words(parameters, 16).tolist()
        src, src_pitch, dst, dst_pitch, width, height = (row[k] for k in (4, 6, 11, 13, 14, 15))
        assert row[2] == row[9] == 4
        assert width <= min(src_pitch, dst_pitch)
        assert max(src_pitch, dst_pitch) <= self.max_pitch
        self.put(
            stream,
            lambda: [ctypes.memmove(dst + k * dst_pitch, src + k * src_pitch, width) for k in range(height)],
        )
        return 0

    def load(self, image: bytes, name: str, shared: int) -> tuple[int, int]:
        self.handle += 1
        return self.handle, self.handle

    def launch(self, function: int, programs: int, threads: int, shared: int, stream: int, argument: int) -> None:
        self.check("cuLaunchKernel")
        shape = self.shapes[function]
        self.put(stream, lambda: kernel(argument, shape, self.random))

    def put(self, stream: int, work: Callable[[], object]) -> None:
        with self.lock:
            self.streams[stream].append(lambda: (work(), True)[1])


def words(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_int64 * count).from_address(address), np.int64) if count else np.empty(0, np.int64)


def kernel(header: int, shape, order: random.Random) -> None:
    """What the copy kernel does with a header, a row at a time, in any order."""
    units, items, chunks, *columns = words(header, 8).tolist()
    src_units, dst_units = (words(at, units).tolist() for at in columns[:2])
    src_items, dst_items, sizes = (words(at, items).tolist() for at in columns[2:])
    rows = [(unit, item) for unit in range(units) for item in range(items)]
    order.shuffle(rows)
    for unit, item in rows:
        src, dst, nbytes = src_units[unit] + src_items[item], dst_units[unit] + dst_items[item], sizes[item]
        assert (src | dst | nbytes) % shape.word == 0, "the word divides every address and size"
        assert nbytes <= chunks * shape.width, "an item has no more chunks than the header says"
        ctypes.memmove(dst, src, nbytes)

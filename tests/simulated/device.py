"""A GPU that is not there: the driver's calls on CPU memory, in every order that streams and events allow.

What is put on a stream waits there. Asking for an event lets streams advance in random turns until it has passed, so
that a missing wait between two streams shows as wrong bytes, sooner or later. Kernels are carried out as their header
says.
"""

# ruff: noqa: N802  # the driver's names

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvplan.cuda import calls
from kvplan.cuda.call_list import ENDED, FAILED, HURRIED, PLAYED, Segment
from kvplan.cuda.device import HOST_MEMORY, MEMORY_TYPE, SUCCESS, DriverError
from kvplan.cuda.driver import RELAXED
from kvplan.execute.gpu.arena import Piece
from kvplan.execute.gpu.launches.headers import write_units
from kvplan.execute.gpu.resources import DEFAULT_LIMITS, Limits
from kvplan.execute.gpu.shape import Shape
from tests.simulated.call_player import play_slowly
from tests.simulated.ipc import IpcEntries
from tests.simulated.issuer import Issuer
from tests.simulated.kernel import kernel, words
from tests.simulated.streams import Streams


class Driver(IpcEntries):
    """The few entry points that are called past the device."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.cuMemcpyBatchAsync: Any = True

    def cuEventQuery(self, event: int) -> int:
        return self._device.query(event)

    def cuEventSynchronize(self, event: int) -> int:
        assert getattr(self._device.mode, "now", 0) == RELAXED, "it would break a capture in another thread"
        self._device.run_until(event)
        return SUCCESS

    def cuEventDestroy_v2(self, event: int) -> int:
        return self._device.destroy_event(event)

    def cuStreamDestroy_v2(self, stream: int) -> int:
        return self._device.destroy_stream(stream)

    def cuModuleUnload(self, module: int) -> int:
        self._device.modules.pop(module)
        return SUCCESS

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        modes, cell = self._device.mode, mode
        modes.now, cell.value = cell.value, getattr(modes, "now", 0)
        return SUCCESS

    def compile_kernel(self, shape: Shape, arch: int) -> SimpleNamespace:
        """A kernel that is not compiled: its image says its shape."""
        image = " ".join(str(int(number)) for number in shape).encode()
        return SimpleNamespace(image=image, name="copy_rows", shared=0, threads=32 * shape.warps)

    def name(self, code: int) -> str:
        return f"CUDA_ERROR_SIMULATED ({code})"

    def check(self, call: str, code: int, what: str = "", at: int | None = None) -> None:
        if code != SUCCESS:
            raise DriverError(f"{call} returned {self.name(code)}{what and ': '}{what}", call, code, at)


class Device(Streams):
    """Has the methods of `kvplan.cuda.device.Device`.

    Args:
        seed: of the order in which streams advance.
        eager: whether a query lets streams advance; else only blocking and :meth:`run` do.
        beside: another GPU of the same machine: streams and events of both know one another.

    Attributes:
        unreachable: by ordinal of a peer, the reason why it cannot be reached.
        enabled: ordinals of the peers that were enabled, in order.
    """

    arch = 90
    multiprocessors = 132
    max_pitch = 2**31 - 1
    limits: Limits = DEFAULT_LIMITS  # of the last executor

    def __init__(self, seed: int = 0, *, ordinal: int = 0, eager: bool = True, beside: Device | None = None) -> None:
        super().__init__(seed, ordinal, beside, eager=eager)
        self.driver = Driver(self)
        self.modules: dict[int, Shape] = {}
        self.mode = threading.local()  # `now`: what a thread may do while another captures
        self.wrong: list[AssertionError] = []  # what work has found amiss
        self.unreachable: dict[int, str] = {}
        self.enabled: list[int] = []

    def enable_peer(self, ordinal: int) -> str:
        why = self.unreachable.get(ordinal, "")
        if not why and ordinal not in self.enabled:
            self.enabled.append(ordinal)
        return why

    @property
    def context(self) -> int:
        return 0xC0 + self.ordinal

    def is_current(self) -> bool:
        return True

    def capturing(self, stream: int) -> bool:
        return stream == self.captured

    # Work.

    def check(self, call: str, count: int | None = None) -> None:
        code = self.fault(call)
        self.driver.check(call, code, at=None if count is None else self.random.randrange(count))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.check("cuMemcpyAsync")
        self.put(stream, lambda: ctypes.memmove(dst, src, nbytes))

    def write_word(self, stream: int, address: int, value: int) -> None:
        self.put(stream, lambda: ctypes.memmove(address, ctypes.byref(ctypes.c_uint64(value)), 8))

    def write_behind(self, event: int, stream: int, addresses: tuple[int, ...], values: tuple[int, ...]) -> None:
        if event:
            self.wait(stream, event)
        for address, value in zip(addresses, values, strict=True):
            code = self.driver.cuStreamWriteValue64_v2(stream, address, value, 0)
            self.driver.check("cuStreamWriteValue64", code)

    def copy_batch(self, dst: int, src: int, size: int, count: int, stream: int) -> None:
        self.check("cuMemcpyBatchAsync", count)
        columns = [words(at, count).tolist() for at in (dst, src, size)]  # read by the call, not later
        for source, nbytes in zip(*columns[1:], strict=True):
            inlined = nbytes < self.limits.batch_nbytes and self.pointer(source, MEMORY_TYPE) == HOST_MEMORY
            assert not inlined, f"{nbytes} bytes of host memory in a batch: drivers lose them"
        moves = list(zip(*columns, strict=True))
        self.random.shuffle(moves)  # copies of a batch have no order
        self.put(stream, lambda: [ctypes.memmove(*move) for move in moves])

    def play(self, segments: Iterable[Segment], state: np.ndarray) -> None:
        base = 0
        for segment in segments:
            play_slowly(self, segment, state, base)
            if state[FAILED]:
                return
            base += len(segment.rows)
        state[ENDED] = 1

    def synchronize(self, event: int) -> None:
        self.check("cuEventSynchronize")
        self.run_until(event)

    def await_event(self, event: int, hurried: Callable[[], bool]) -> bool:
        self.check("cuEventQuery")
        return self.run_until(event, hurried)

    def issuer(self, name: str, inside: set[int]) -> Issuer:
        return Issuer(self, name, inside)

    def watch(self, state: np.ndarray, rows: int, *, hurry: bool = True) -> bool:
        for _ in range(20):
            if state[PLAYED] >= rows or state[ENDED] or state[FAILED]:
                return True
            if hurry:
                state[HURRIED] = max(state[HURRIED], rows)
            time.sleep(1e-4)
        return False

    def load_loops(self) -> None:
        calls.load()

    def copy_2d(self, parameters: int, stream: int) -> int:
        code = self.fault("cuMemcpy2DAsync")
        if code:
            return code
        row = words(parameters, 16).tolist()
        src, src_pitch, dst, dst_pitch, width, height = (row[k] for k in (4, 6, 11, 13, 14, 15))
        assert row[2] == row[9] == 4
        assert width <= min(src_pitch, dst_pitch)
        assert max(src_pitch, dst_pitch) <= self.max_pitch
        self.put(
            stream,
            lambda: [ctypes.memmove(dst + k * dst_pitch, src + k * src_pitch, width) for k in range(height)],
        )
        return SUCCESS

    def load(self, image: bytes, name: str, shared: int) -> tuple[int, int]:
        """A module and its function; the image says the shape (see `tests.simulated.executors`)."""
        self.check("cuModuleLoadData")
        handle = self.handle_of_next()
        self.modules[handle] = Shape(*map(int, image.split()))
        return handle, handle

    def launch(self, function: int, programs: int, threads: int, shared: int, stream: int, argument: int) -> None:
        self.check("cuLaunchKernelEx")
        shape = self.modules[function]
        assert programs > 0
        assert threads == 32 * shape.warps
        self.launched_on.add(stream)
        self.put(stream, lambda: kernel(argument, shape, self.random, self.check_reach))

    def check_reach(self, address: int) -> None:
        """That a kernel of this GPU reaches an address."""
        for start, end, ordinal in self.owned:
            if start <= address < end:
                assert ordinal in (self.ordinal, *self.enabled), f"cuda:{self.ordinal} reads memory of cuda:{ordinal}"

    def launch_recorded(
        self, begin: int, end: int, kernel: tuple[int, int, int], programs: int, stream: int, argument: int,
        source: int = 0, nbytes: int = 0,
    ) -> None:  # fmt: skip
        function, threads, shared = kernel
        self.record(begin, stream)
        if nbytes:
            self.copy(argument, source, nbytes, stream)
        self.launch(function, programs, threads, shared, stream, argument)
        self.record(end, stream)

    def launch_units(
        self, begin: int, end: int, kernel: tuple[int, int, int], programs: int, stream: int, argument: int,
        source: int, nbytes: int, units: np.ndarray, table: np.ndarray,
    ) -> None:  # fmt: skip
        count = table.size + units.size
        slot = Piece(source, 8 * count, np.frombuffer((ctypes.c_int64 * count).from_address(source), np.int64))
        write_units(slot, argument, 0, table.size, units, tuple(table.tolist()), int(table[-1]))
        self.launch_recorded(begin, end, kernel, programs, stream, argument, source, nbytes)

    def put(self, stream: int, work: Callable[[], object]) -> None:
        with self.lock:
            assert stream != self.captured, "work is put on a stream that is being captured"

            def works() -> bool:
                try:
                    work()
                except AssertionError as error:  # in whichever thread lets streams go on
                    self.wrong.append(error)
                return True

            self.streams[stream].append(works)

"""A GPU that is not there: the driver's calls on CPU memory, in every order that streams and events allow.

What is put on a stream waits there. Asking for an event lets streams advance in random turns until it has passed, so
that a missing wait between two streams shows as wrong bytes, sooner or later. Kernels are carried out as their header
says.
"""

# ruff: noqa: N802  # the driver's names

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvplan.cuda import calls
from kvplan.cuda.device import HOST_MEMORY, MEMORY_TYPE, NOT_READY, SUCCESS, DriverError
from kvplan.cuda.driver import RELAXED
from kvplan.execute.gpu.resources import DEFAULT_LIMITS, Limits
from kvplan.execute.gpu.shape import Shape
from tests.patience import PATIENCE
from tests.simulated.graph import Graph
from tests.simulated.kernel import kernel, words
from tests.simulated.memory import Memory

_now = threading.local()  # `device`: the current one of this thread
CHANGES = 0.05  # how likely a stream gets another rank at a step
LOST = 700


class Driver:
    """The few entry points that are called past the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
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

    def name(self, code: int) -> str:
        return f"CUDA_ERROR_SIMULATED ({code})"

    def check(self, call: str, code: int, what: str = "", at: int | None = None) -> None:
        if code != SUCCESS:
            raise DriverError(f"{call} returned {self.name(code)}{what and ': '}{what}", call, code, at)


class Device(Memory):
    """Has the methods of `kvplan.cuda.device.Device`.

    Args:
        seed: of the order in which streams advance.
        eager: whether a query lets streams advance; else only blocking and :meth:`run` do.
        beside: another GPU of the same machine: streams and events of both know one another.

    Attributes:
        opener: the thread that is to open the gates, which must not block behind one.
        blocked: set when a thread blocks behind what does not go on by itself.
        unreachable: by ordinal of a peer, the reason why it cannot be reached.
        enabled: ordinals of the peers that were enabled, in order.
    """

    arch = 90
    multiprocessors = 132
    max_pitch = 2**31 - 1
    limits: Limits = DEFAULT_LIMITS  # of the last executor

    def __init__(self, seed: int = 0, *, ordinal: int = 0, eager: bool = True, beside: Device | None = None) -> None:
        self.ordinal = ordinal
        self.eager = eager
        self.driver = Driver(self)
        self.random = random.Random(seed)
        super().__init__()
        self.streams: dict[int, deque[Callable[[], bool]]] = {}
        self.ranks: dict[int, float] = {}  # of streams: the lowest goes first
        self.recorded: dict[int, int] = {}  # of each event, how often it was recorded
        self.passed: dict[int, int] = {}
        self.marks: dict[int, list[int]] = {}  # of each event, its last record: filled once that has passed
        self.theirs: set[int] = set()  # events that are not kvplan's
        self.modules: dict[int, Shape] = {}
        self.graph: Graph | None = None
        self.gates: list[threading.Event] = []
        self.opener: threading.Thread | None = None
        self.blocked = threading.Event()
        self.handle = 100
        self.faults: dict[str, list[int]] = {}  # by call, the codes that the next ones return
        self.lost = False
        self.made: set[int] = set()  # events of this GPU
        self.opened: set[int] = set()  # streams of this GPU
        self.peers: dict[int, Device] = {ordinal: self}
        self.default: int = 0  # the stream behind the handle 0
        if beside is not None:
            shared = ("lock", "random", "streams", "ranks", "recorded", "passed", "marks", "theirs", "gates", "peers")
            for name in shared:
                setattr(self, name, getattr(beside, name))
            self.peers[ordinal] = self
        self.mode = threading.local()  # `now`: what a thread may do while another captures
        self.wrong: list[AssertionError] = []  # what work has found amiss
        self.calls: list[str] = []
        self.unreachable: dict[int, str] = {}
        self.enabled: list[int] = []

    def beside(self, ordinal: int) -> Device:
        return self.peers[ordinal]

    def handle_of_next(self) -> int:
        first = min(self.peers.values(), key=lambda device: device.ordinal)
        first.handle += 1
        return first.handle

    def enable_peer(self, ordinal: int) -> str:
        why = self.unreachable.get(ordinal, "")
        if not why and ordinal not in self.enabled:
            self.enabled.append(ordinal)
        return why

    # Streams and events.

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        outer, _now.device = getattr(_now, "device", None), self
        try:
            yield
        finally:
            _now.device = outer

    def is_current(self) -> bool:
        return True

    def stream(self, *, urgent: bool = False) -> int:
        with self.lock:
            handle = self.handle_of_next()
            self.streams[handle] = deque()
            self.opened.add(handle)
            return handle

    def event(self) -> int:
        self.check("cuEventCreate")
        with self.lock:
            handle = self.handle_of_next()
            self.made.add(handle)
            self.recorded[handle] = self.passed[handle] = 0
            return handle

    def destroy_event(self, event: int) -> int:
        with self.lock:
            passed = self.recorded.pop(event) == self.passed.pop(event)
            self.marks.pop(event, None)
            self.made.discard(event)
            assert passed or self.lost, "an event was destroyed before it passed"
        return SUCCESS

    def destroy_stream(self, stream: int) -> int:
        with self.lock:
            assert not self.streams.pop(stream) or self.lost, "a stream was destroyed with work on it"
        return SUCCESS

    def record(self, event: int, stream: int) -> None:
        self.check("cuEventRecord")
        assert event in self.made, "a GPU records its own events only"
        assert stream in self.opened, "a GPU records on its own streams only"
        with self.lock:
            if self.graph is not None and stream in self.graph.tails:
                self.graph.record(event, stream)
                return
            self.recorded[event] += 1
            number, mark = self.recorded[event], []
            self.marks[event] = mark

            def passes() -> bool:
                self.passed[event] = max(self.passed[event], number)
                mark.append(number)
                return True

            self.streams[stream].append(passes)

    def wait(self, stream: int, event: int) -> None:
        self.check("cuStreamWaitEvent")
        with self.lock:
            graph = self.graph
            if graph is not None and (stream in graph.tails or event in graph.events):
                graph.wait(stream, event)
                return
            mark = self.marks.get(event, [0])  # what is recorded now, not later, and not what passes elsewhere instead
            if not stream:  # the default stream of the current device
                stream = _now.device.default
            self.streams[stream].append(lambda: bool(mark))

    def query(self, event: int) -> int:
        code = self.fault("cuEventQuery")
        if code:
            return code
        with self.lock:
            if self.eager:
                self.advance(self.random.randrange(4))
            return SUCCESS if self.passed[event] >= self.recorded[event] else NOT_READY

    def run_until(self, event: int) -> None:
        """Block until an event has passed; behind a closed gate, until somebody opens it."""
        end = time.monotonic() + PATIENCE
        with self.lock:
            number = self.recorded[event]
        while not self.lost:
            with self.lock:
                if self.passed[event] >= number:
                    return
                done = self.advance(1)
                assert done or not all(gate.is_set() for gate in self.gates), "the streams wait for each other"
            if not done:
                assert threading.current_thread() is not self.opener, "who is to open the gate waits behind it"
                assert time.monotonic() < end, "nobody opened the gate"
                self.blocked.set()
                time.sleep(1e-3)

    def run(self) -> None:
        """Everything that was put on streams."""
        with self.lock:
            while self.advance(64):
                pass

    def advance(self, steps: int) -> int:
        """Let streams do their next thing, one ahead of another for a while; how many things were done.

        Even turns would hardly ever starve a stream, which is what shows that another does not wait for it.
        """
        done, order = 0, self.random
        for _ in range(0 if self.lost else steps):
            waiting = [stream for stream, queue in self.streams.items() if queue]
            if waiting and order.random() < CHANGES:
                self.ranks[order.choice(waiting)] = order.random()
            for stream in sorted(waiting, key=lambda stream: self.ranks.setdefault(stream, order.random())):
                queue = self.streams[stream]
                if queue[0]():
                    queue.popleft()
                    done += 1
                    break
            else:
                return done
        return done

    def gate(self, stream: int) -> threading.Event:
        """Hold a stream up until the gate is set."""
        gate = threading.Event()
        with self.lock:
            self.gates.append(gate)
            self.streams[stream].append(gate.is_set)
        return gate

    def seconds(self, begin: int, end: int) -> float:
        assert min(self.passed[begin], self.passed[end]) > 0
        return 1e-6

    # Graphs.

    def capture(self, stream: int) -> Graph:
        """Begin to capture a stream."""
        self.graph = Graph(stream)
        return self.graph

    def end_capture(self) -> None:
        graph, self.graph = self.graph, None
        graph.check_joined()

    def capturing(self, stream: int) -> bool:
        return self.graph is not None and stream in self.graph.tails

    # Work.

    def fail(self, call: str, *, spare: int = 0, code: int = 1) -> None:
        """Let a call fail once, after ``spare`` that do not."""
        self.faults[call] = [SUCCESS] * spare + [code]

    def fault(self, call: str) -> int:
        """What a call is to return."""
        self.calls.append(call)
        if self.lost:
            return LOST
        codes = self.faults.get(call)
        return codes.pop(0) if codes else SUCCESS

    def check(self, call: str, count: int | None = None) -> None:
        code = self.fault(call)
        self.driver.check(call, code, at=None if count is None else self.random.randrange(count))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.check("cuMemcpyAsync")
        self.put(stream, lambda: ctypes.memmove(dst, src, nbytes))

    def copy_batch(self, dst: int, src: int, size: int, count: int, stream: int) -> None:
        self.check("cuMemcpyBatchAsync", count)
        columns = [words(at, count).tolist() for at in (dst, src, size)]  # read by the call, not later
        for source, nbytes in zip(*columns[1:], strict=True):
            inlined = nbytes < self.limits.batch_nbytes and self.pointer(source, MEMORY_TYPE) == HOST_MEMORY
            assert not inlined, f"{nbytes} bytes of host memory in a batch: drivers lose them"
        moves = list(zip(*columns, strict=True))
        self.random.shuffle(moves)  # copies of a batch have no order
        self.put(stream, lambda: [ctypes.memmove(*move) for move in moves])

    def issue(self, rows: np.ndarray, columns: np.ndarray, kernel: tuple[int, int, int], programs: int) -> None:
        function, threads, shared = kernel
        src, dst, size = (column.ctypes.data for column in columns)
        for which, one, end, stream in rows.tolist():
            if which == calls.RECORD:
                self.record(one, stream)
            elif which == calls.WAIT:
                self.wait(stream, one)
            elif which == calls.LAUNCH:
                self.launch(function, programs, threads, shared, stream, one)
            elif which == calls.COPY:
                source, target, nbytes = columns[:, one].tolist()
                self.copy(target, source, nbytes, stream)
            else:
                assert which == calls.BATCH
                try:
                    self.copy_batch(dst + 8 * one, src + 8 * one, size + 8 * one, end - one, stream)
                except DriverError as error:
                    error.at += one
                    raise

    def load_loops(self) -> None:
        calls.load()

    def copy_each(self, dst: np.ndarray, src: np.ndarray, size: np.ndarray, stream: int) -> None:
        for k, move in enumerate(zip(dst.tolist(), src.tolist(), size.tolist(), strict=True)):
            try:
                self.copy(*move, stream)
            except DriverError as error:
                error.at = k
                raise

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

    def put(self, stream: int, work: Callable[[], object]) -> None:
        with self.lock:
            if self.graph is not None and stream in self.graph.tails:
                self.graph.add(stream, work)
                return

            def works() -> bool:
                try:
                    work()
                except AssertionError as error:  # in whichever thread lets streams go on
                    self.wrong.append(error)
                return True

            self.streams[stream].append(works)

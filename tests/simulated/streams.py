"""Streams and events of a GPU that is not there: what is put on a stream waits there until an event is asked for."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

from kvplan.cuda.device import NOT_READY, SUCCESS
from tests.patience import PATIENCE
from tests.simulated.memory import Memory

_now = threading.local()  # `device`: the current one of this thread
CHANGES = 0.05  # how likely a stream gets another rank at a step
LOST = 700
# Attributes that all GPUs of a machine share.
SHARED = ("lock", "random", "streams", "ranks", "recorded", "passed", "marks", "theirs", "gates", "peers")


class Streams(Memory):
    """The streams and events of one GPU.

    Args:
        seed: of the order in which streams advance.
        eager: whether a query lets streams advance; else only blocking and :meth:`run` do.
        beside: another GPU of the same machine: streams and events of both know one another.

    Attributes:
        opener: the thread that is to open the gates, which must not block behind one.
        blocked: set when a thread blocks behind what does not go on by itself.
    """

    def __init__(self, seed: int, ordinal: int, beside: Self | None, *, eager: bool) -> None:
        super().__init__()
        self.ordinal = ordinal
        self.eager = eager
        self.random = random.Random(seed)
        self.streams: dict[int, deque[Callable[[], bool]]] = {}
        self.ranks: dict[int, float] = {}  # of streams: the lowest goes first
        self.recorded: dict[int, int] = {}  # of each event, how often it was recorded
        self.passed: dict[int, int] = {}
        self.marks: dict[int, list[int]] = {}  # of each event, its last record: filled once that has passed
        self.theirs: set[int] = set()  # events that are not kvplan's
        self.captured: int | None = None  # the stream that is being captured into a graph
        self.gates: list[threading.Event] = []
        self.opener: threading.Thread | None = None
        self.blocked = threading.Event()
        self.handle = 100
        self.faults: dict[str, list[int]] = {}  # by call, the codes that the next ones return
        self.calls: list[str] = []
        self.lost = False
        self.made: set[int] = set()  # events of this GPU
        self.opened: set[int] = set()  # streams of this GPU
        self.lent: int | None = None  # a stream of the caller's for all kernels
        self.launched_on: set[int] = set()  # streams on which kernels were launched
        self.peers: dict[int, Self] = {ordinal: self}
        self.default: int = 0  # the stream behind the handle 0
        if beside is not None:
            for name in SHARED:
                setattr(self, name, getattr(beside, name))
            self.peers[ordinal] = self

    def beside(self, ordinal: int) -> Self:
        return self.peers[ordinal]

    def handle_of_next(self) -> int:
        first = min(self.peers.values(), key=lambda device: device.ordinal)
        first.handle += 1
        return first.handle

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        outer, _now.device = getattr(_now, "device", None), self
        try:
            yield
        finally:
            _now.device = outer

    def stream(self, *, urgent: bool = False, made: Any = None) -> int:
        with self.lock:
            handle = self.handle_of_next()
            self.streams[handle] = deque()
            self.opened.add(handle)
            if made is not None:
                made.value = handle
            return handle

    def event(self, made: Any = None) -> int:
        self.check("cuEventCreate")
        with self.lock:
            handle = self.handle_of_next()
            self.made.add(handle)
            self.recorded[handle] = self.passed[handle] = 0
            if made is not None:
                made.value = handle
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
            assert stream != self.captured, "an event is recorded on a stream that is being captured"
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
            assert stream != self.captured, "a stream that is being captured waits for an event outside its graph"
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

    def run_until(self, event: int, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Block until an event has passed; behind a closed gate, until somebody opens it, or is in a hurry."""
        end = time.monotonic() + PATIENCE
        with self.lock:
            number = self.recorded[event]
        while not self.lost:
            with self.lock:
                if self.passed[event] >= number or hurried():
                    return self.passed[event] >= number
                done = self.advance(1)
                assert done or not all(gate.is_set() for gate in self.gates), "the streams wait for each other"
            if not done:
                assert threading.current_thread() is not self.opener, "who is to open the gate waits behind it"
                assert time.monotonic() < end, "nobody opened the gate"
                self.blocked.set()
                time.sleep(1e-3)
        return True

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

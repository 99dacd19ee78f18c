"""What a test needs of a machine with a GPU: memory, streams, work on them; simulated, or real by torch."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

import kvplan
from tests.paged_caches import put
from tests.simulated.objects import Event, Tensor
from tests.simulated_driver import SimulatedDriver, simulated

PATIENCE = 120.0  # seconds after which a test fails rather than hangs
BUSY_CYCLES = 20_000_000  # of a real GPU: some 10 ms
HOSTS = ("pinned", "pageable")  # places of memory beside "cuda:0" and "cuda:1"


class Machine:
    """A machine with GPUs.

    Its memory has ``view(shape, strides, start)``, a tensor of bytes, and ``bytes()``, those now. ``place(content,
    place)`` puts bytes at "pinned", "pageable", "cuda:0" or "cuda:1". ``stream(device)`` and ``event(stream)``,
    recorded on it, are the caller's; ``hold(stream)`` holds one up until ``open()`` of what it gives, or the end of the
    context; ``copy(stream, target, source)`` lets it copy all bytes of one memory, which is not pageable, late;
    ``finish(stream)`` waits for it alone; and ``capture(stream)`` captures a CUDA graph on it.

    Attributes:
        count: number of GPUs.
        rounds: how often a test repeats what may go well by luck.
    """

    count: int
    rounds: int

    def __init__(self) -> None:
        self.executors: list[kvplan.Executor] = []
        self._stack = ExitStack()

    def executor(self, path="auto", device="cuda:0", profile=None, kernel_stream=None, **policy) -> kvplan.Executor:
        """An executor, which is closed after the test."""
        made = kvplan.Executor(device, kvplan.Policy(path=path, **policy), profile, kernel_stream=kernel_stream)
        self.executors.append(made)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        while self.executors:
            self.executors.pop().close()
        self._stack.__exit__(*error)

    def forgive(self) -> None:
        """Forget a stream or an event that an interrupt lost with the transfer in whose submit it came."""


class SimulatedMemory:
    """An array that says where it is."""

    def __init__(self, content: np.ndarray, place: str) -> None:
        self.root, self.place, self.nbytes = content.copy(), place, content.nbytes

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Any:
        array = np.ndarray(shape, np.uint8, self.root, start, strides)
        return array if self.place in HOSTS else Tensor(array, self.place)

    def bytes(self) -> np.ndarray:
        return self.root.copy()


@dataclass
class SimulatedStream:
    """What kvplan reads of a stream of torch."""

    driver: SimulatedDriver
    device_index: int

    def __post_init__(self) -> None:
        self.cuda_stream = self.driver.stream(self.device_index)

    def record_event(self) -> Event:
        """As of torch: the event is destroyed with the object."""
        made = Event(self.driver.event(self.cuda_stream))
        weakref.finalize(made, self.driver.drop, made.cuda_event)
        return made


class Simulated(Machine):
    """A simulated driver with two GPUs.

    Attributes:
        driver: the driver.
    """

    count, rounds = 2, 6

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seed = seed

    def __enter__(self) -> Self:
        self.driver = self._stack.enter_context(simulated(2, self._seed))
        return self

    def forgive(self) -> None:
        self.driver.forgive()

    def place(self, content: np.ndarray, place: str) -> SimulatedMemory:
        made = SimulatedMemory(content, place)
        if place == "pinned":
            self.driver.pin(made.root)
        elif place != "pageable":
            self.driver.own(made.root, int(place[-1]))
        return made

    def stream(self, device: str = "cuda:0") -> SimulatedStream:
        return SimulatedStream(self.driver, int(device[-1]))

    def event(self, stream: SimulatedStream) -> Event:
        return stream.record_event()

    @contextmanager
    def hold(self, stream: SimulatedStream) -> Any:
        gate = self.driver.gate(stream.cuda_stream)
        try:
            yield gate
        finally:
            gate.open()

    def copy(self, stream: SimulatedStream, target: SimulatedMemory, source: SimulatedMemory) -> None:
        self.driver.put(stream.cuda_stream, lambda: np.copyto(target.root, source.root))

    def finish(self, stream: SimulatedStream) -> None:
        event = self.event(stream)  # lives until then
        self.driver.wait_until(event.cuda_event)

    @contextmanager
    def capture(self, stream: SimulatedStream) -> Any:
        self.driver.capturing.add(stream.cuda_stream)
        try:
            yield
        finally:
            self.driver.capturing.discard(stream.cuda_stream)


class RealMemory:
    """A tensor of torch."""

    def __init__(self, content: np.ndarray, place: str) -> None:
        self.place, self.nbytes = place, content.nbytes
        self.root = put(content, "cpu" if place == "pageable" else place)

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Any:
        return self.root.as_strided(shape, strides, start)

    def bytes(self) -> np.ndarray:
        return self.root.cpu().numpy().copy()


class Real(Machine):
    """The GPUs that torch finds."""

    rounds = 3

    def __enter__(self) -> Self:
        import torch

        self.count, self._copied = torch.cuda.device_count(), list[tuple[RealMemory, RealMemory]]()
        torch.cuda.init()
        for ordinal in range(self.count):  # the driver loads a kernel at its first launch, and not while a stream waits
            with torch.cuda.device(ordinal):
                torch.cuda._sleep(1)
                torch.zeros(2, dtype=torch.uint8, device="cuda")[:1].copy_(
                    torch.ones(1, dtype=torch.uint8, device="cuda")
                )
            torch.cuda.synchronize(ordinal)
        return self

    def place(self, content: np.ndarray, place: str) -> RealMemory:
        return RealMemory(content, place)

    def stream(self, device: str = "cuda:0") -> Any:
        import torch

        return torch.cuda.Stream(device)

    def event(self, stream: Any) -> Any:
        import torch

        made = torch.cuda.Event()
        made.record(stream)
        return made

    def hold(self, stream: Any) -> AbstractContextManager[Any]:
        from tests.gpu.gate import Gate

        return Gate(stream)

    def copy(self, stream: Any, target: RealMemory, source: RealMemory) -> None:
        import torch

        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY_CYCLES)
            target.root.copy_(source.root, non_blocking=True)
        self._copied.append((target, source))  # they live until the test has ended

    def finish(self, stream: Any) -> None:
        stream.synchronize()

    @contextmanager
    def capture(self, stream: Any) -> Any:
        import torch

        graph, word = torch.cuda.CUDAGraph(), torch.zeros(1, device=stream.device)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            word.add_(1)  # a graph is not empty
            yield

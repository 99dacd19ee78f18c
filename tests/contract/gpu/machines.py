"""What a test needs of a machine with a GPU: memory, streams, work on them; simulated, or real by torch."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

import kvplan
from tests.simulated.objects import Event, Tensor
from tests.simulated_driver import SimulatedDriver, simulated

PATIENCE = 60.0  # seconds after which a test fails rather than hangs
BUSY_CYCLES = 20_000_000  # of a real GPU: some 10 ms
HOSTS = ("pinned", "pageable")  # places of memory beside "cuda:0" and "cuda:1"


class Memory(ABC):
    """Bytes at a place.

    Attributes:
        place: "pinned", "pageable", "cuda:0" or "cuda:1".
        nbytes: their number.
    """

    place: str
    nbytes: int

    @abstractmethod
    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Any:
        """A tensor of bytes in it, as kvplan is given one."""

    @abstractmethod
    def bytes(self) -> np.ndarray:
        """Its bytes, now."""


class Machine(ABC):
    """A machine with GPUs.

    Attributes:
        count: number of GPUs.
        rounds: how often a test repeats what may go well by luck.
    """

    count: int
    rounds: int

    def __init__(self) -> None:
        self.executors: list[kvplan.Executor] = []
        self._stack = ExitStack()

    def executor(self, path: str = "auto", device: str = "cuda:0", **policy: Any) -> kvplan.Executor:
        """An executor, which is closed after the test."""
        made = kvplan.Executor(device, kvplan.Policy(path=path, **policy))
        self.executors.append(made)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self.executors:
            self.executors.pop().close()
        self._stack.__exit__(kind, error, traceback)

    def forgive(self) -> None:  # noqa: B027  # a real driver counts no handles
        """Forget a stream or an event that an interrupt lost with the transfer in whose submit it came."""

    @abstractmethod
    def place(self, content: np.ndarray, place: str) -> Memory:
        """Put bytes at a place."""

    @abstractmethod
    def stream(self, device: str = "cuda:0") -> Any:
        """A stream of the caller's."""

    @abstractmethod
    def event(self, stream: Any) -> Any:
        """An event of the caller's, recorded on a stream."""

    @abstractmethod
    def hold(self, stream: Any) -> AbstractContextManager[Any]:
        """Hold a stream up until ``open()`` is called, or the context ends."""

    @abstractmethod
    def copy(self, stream: Any, target: Memory, source: Memory) -> None:
        """Let a stream copy all bytes of one memory to another, late. Neither is pageable."""

    @abstractmethod
    def finish(self, stream: Any) -> None:
        """Wait for what was put on a stream, and for nothing else."""

    @abstractmethod
    def capture(self, stream: Any) -> AbstractContextManager[None]:
        """Capture a CUDA graph on a stream."""


class SimulatedMemory(Memory):
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


class RealMemory(Memory):
    """A tensor of torch."""

    def __init__(self, content: np.ndarray, place: str) -> None:
        import torch

        host = torch.from_numpy(content.copy())
        self.place, self.nbytes = place, content.nbytes
        if place == "pinned":
            self.root = torch.empty(host.numel(), dtype=torch.uint8, pin_memory=True).copy_(host)
        else:
            self.root = host if place == "pageable" else host.to(place)
        if self.root.is_cuda:
            torch.cuda.synchronize(self.root.device)  # a pageable copy may return before its last bytes have landed

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

"""Run tables in GPU memory, uploaded once per run group; and compiled kernels, loaded once per executor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from kvplan.cuda.device import Device, Uncaptured
from kvplan.execute.gpu.memory import Arena, Handles, Piece
from kvplan.execute.gpu.shape import Shape, cut, shape_of
from kvplan.layout.strides import Int64Array
from kvplan.program.program import RunGroup

HEADER = 9  # words of a launch's header


class Kernel(NamedTuple):
    """A loaded kernel: its function, threads of a program, and bytes of shared memory of a program."""

    function: int
    threads: int
    shared: int


Dropped = tuple[int, Piece, Piece]  # the event behind an upload, its source and its target


class Table:
    """The run table of one run group: its items in GPU memory.

    Attributes:
        shape, kernel: of the kernel that reads the items.
        header: (9,) int64: the header of a launch, without units. Word 1 is the number of items per unit.
        fresh: event behind the upload; 0 after the event is known to have passed.
    """

    def __init__(self, shape: Shape, kernel: Kernel, header: Int64Array, fresh: int) -> None:
        self.shape = shape
        self.kernel = kernel
        self.header = header
        self.fresh = fresh


class Tables:
    """All run tables of one executor. A table exists as long as its run group; every plan of the group keeps it alive.

    Args:
        device: the GPU.
        handles: streams and events of the executor.
        slots: pinned host memory.
        memory: GPU memory.
    """

    def __init__(self, device: Device, handles: Handles, slots: Arena, memory: Arena) -> None:
        self._device = device
        self._handles = handles
        self._slots = slots
        self._arena = memory
        self._known: weakref.WeakKeyDictionary[RunGroup, dict[Hashable, Table]] = weakref.WeakKeyDictionary()
        self._functions: dict[Shape, Kernel] = {}
        self._lock = threading.RLock()  # compiling takes long, so it is not the executor's lock
        self._modules: list[int] = []
        self._dropped: list[Dropped] = []  # of run groups that are gone; the upload may not have ended
        self._stream = 0

    def get(
        self, group: RunGroup, items: Int64Array, alignment: int, tile: int, *, key: Hashable, warps: int
    ) -> Table:  # fmt: skip
        """Return the table of (3, n) ``items``, cut to the width of a row. The first call makes and uploads it.

        Args:
            group: the run group.
            items: source offset, destination offset and bytes of each copy of a unit.
            alignment: number of bytes that divides all addresses and sizes.
            tile, warps: bytes in flight per program, and most warps of a program.
            key: tells the items of the same run group apart.
        """
        known, entry = self._known.get(group), (key, tile, warps)
        table = None if known is None else known.get(entry)
        if table is None:
            with self._lock, self._device.current(), Uncaptured(self._device):
                known = self._known.setdefault(group, {})
                table = known.get(entry)
                if table is None:
                    shape = shape_of(alignment, int(items[2].max()), tile, warps)
                    table = known[entry] = self._make(group, items, shape)
        return table

    def ready(self, table: Table, stream: int) -> bool:
        """Return whether the upload is known to have ended; if not, a stream waits for it. The device is current."""
        if not table.fresh:
            return True
        device = self._device
        with self._lock, Uncaptured(device):
            if table.fresh and device.driver.cuEventQuery(table.fresh):  # not ready; or an error, which a wait shows
                device.wait(stream, table.fresh)
                return False
            if table.fresh:
                self._handles.unused.append(table.fresh)
                table.fresh = 0
        return True

    def function(self, shape: Shape) -> Kernel:
        """Return the kernel of a shape. The first call compiles and loads it."""
        made = self._functions.get(shape)
        return self._compile(shape) if made is None else made

    def _compile(self, shape: Shape) -> Kernel:
        device = self._device
        compile_kernel = device.driver.compile_kernel
        if compile_kernel is None:
            from kvplan.execute.gpu import kernel  # only here, since it imports Triton

            compile_kernel = kernel.compile_kernel
        with self._lock, device.current(), Uncaptured(device):
            if shape not in self._functions:
                compiled = compile_kernel(shape, device.arch)
                module, function = device.load(compiled.image, compiled.name, compiled.shared)
                self._modules.append(module)
                self._functions[shape] = Kernel(function, compiled.threads, compiled.shared)
        return self._functions[shape]

    def synchronize(self) -> None:
        """Wait for all uploads so far: without transfers that use them, nothing keeps run groups alive meanwhile."""
        with self._lock, self._device.current(), Uncaptured(self._device):
            if self._stream:
                event = self._handles.event()
                self._device.record(event, self._stream)
                self._device.synchronize(event)
                self._handles.unused.append(event)

    def close(self) -> None:
        """Unload all kernels and drop all tables. The device is current, and no transfer is in flight."""
        for module in self._modules:
            self._device.driver.cuModuleUnload(module)
        self._modules.clear()
        self._functions.clear()
        self._known.clear()

    def _make(self, group: RunGroup, items: Int64Array, shape: Shape) -> Table:
        """Make a table and upload it, on a stream for uploads."""
        kernel, device = self.function(shape), self._device
        self._stream = self._stream or self._handles.stream(urgent=True)
        for dropped in [one for one in self._dropped if not device.driver.cuEventQuery(one[0])]:
            self._dropped.remove(dropped)
            _give_back(self._handles.unused, *dropped)
        made = cut(items, shape.width)
        count = made.shape[1]
        source, target, fresh = self._slots.take(made.nbytes), self._arena.take(made.nbytes), self._handles.event()
        source.words[: made.size] = made.ravel()
        device.copy(target.address, source.address, made.nbytes, self._stream)  # if it fails, the memory is not reused
        device.record(fresh, self._stream)
        at, step = target.address, 8 * count
        header = np.array([0, count, 1, 0, 0, at, at + step, at + 2 * step, 1], dtype=np.int64)
        table = Table(shape, kernel, header, fresh)
        weakref.finalize(group, _drop, self._handles.unused, self._dropped, source, target, table).atexit = False
        return table


def _drop(events: list[int], dropped: list[Dropped], source: Piece, target: Piece, table: Table) -> None:
    """Give back the memory and the event of a table, after its run group is deleted. No transfer uses the table."""
    fresh, table.fresh = table.fresh, 0
    if fresh:  # the upload may still write, if no transfer has waited for it
        dropped.append((fresh, source, target))
    else:
        _give_back(events, fresh, source, target)


def _give_back(events: list[int], fresh: int, source: Piece, target: Piece) -> None:
    source.free.append(source)
    target.free.append(target)
    if fresh:
        events.append(fresh)

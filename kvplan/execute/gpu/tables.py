"""Run tables in GPU memory, uploaded once a program; and compiled kernels, loaded once a device."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import numpy as np

from kvplan.base.threads import aside
from kvplan.cuda.device import NOT_READY, Device, Uncaptured
from kvplan.errors import TransferError
from kvplan.execute.gpu.arena import Arena, Piece
from kvplan.execute.gpu.shape import MAX_WARPS, Shape, cut, shape_of
from kvplan.layout.strides import Int64Array
from kvplan.program.program import RunGroup

Kernel = tuple[int, int, int]  # function, threads of a program, bytes of shared memory


class Table:
    """Items of one run group in GPU memory.

    Attributes:
        shape: of the kernel that reads them.
        kernel: its function, threads a program, shared memory.
        items: how many, for each unit.
        header, words: (8,) int64: the header of a launch, units left open; and the same as Python's integers.
        fresh: event behind the upload, or 0 once it is known to have passed.
    """

    def __init__(self, shape: Shape, kernel: Kernel, items: int, header: Int64Array, fresh: int) -> None:
        self.shape = shape
        self.kernel = kernel
        self.items = items
        self.header = header
        self.words: tuple[int, ...] = tuple(header.tolist())
        self.fresh = fresh


class Tables:
    """All run tables of one executor. A table lives as long as its run group, which every plan of it holds.

    Args:
        device: the GPU.
        lock: of the executor.
        events: events that no transfer uses.
        slots: pinned host memory.
        memory: GPU memory.
    """

    def __init__(self, device: Device, lock: Any, events: list[int], slots: Arena, memory: Arena) -> None:
        self._device = device
        self._lock = lock
        self._events = events
        self._slots = slots
        self._arena = memory
        self._known: weakref.WeakKeyDictionary[RunGroup, dict[Any, Table]] = weakref.WeakKeyDictionary()
        self._functions: dict[Shape, Kernel] = {}
        self._compiling = threading.RLock()
        self._modules: list[int] = []
        self._aside = 0

    def get(
        self, group: RunGroup, items: Int64Array, alignment: int, tile: int, stream: int, *, key: Any,
        max_warps: int = MAX_WARPS,
    ) -> Table:  # fmt: skip
        """The table of (3, n) ``items``, cut to what a row has in flight; made and uploaded when first asked for."""
        table = self._table(group, items, alignment, tile, stream, key, max_warps)
        if table.fresh:
            self._wait(table, stream)
        return table

    def _table(
        self, group: RunGroup, items: Int64Array, alignment: int, tile: int, stream: int, key: Any, max_warps: int
    ) -> Table:
        entry = (key, tile, max_warps)
        known = self._known.get(group)
        table = None if known is None else known.get(entry)
        if table is None:
            shape = shape_of(alignment, int(items[2].max()), tile, max_warps)
            kernel = self.function(shape)
            table = aside(partial(self._enter, group, items, shape, kernel, stream, entry))
        return table

    def _enter(
        self, group: RunGroup, items: Int64Array, shape: Shape, kernel: Kernel, stream: int, entry: Any
    ) -> Table:  # fmt: skip
        device = self._device
        with device.current(), self._lock, Uncaptured(device):
            known = self._known.setdefault(group, {})
            table = known.get(entry)
            if table is None:
                table = known[entry] = self._make(group, items, shape, kernel, stream)
        return table

    def warm_up(
        self, group: RunGroup, items: Int64Array, alignment: int, tile: int, *, key: Any, max_warps: int = MAX_WARPS
    ) -> None:
        """Make a table before the first transfer, on a stream of its own, and wait until it is there.

        No transfer keeps the group meanwhile: were it dropped, the upload would write into memory given to others.
        """
        device = self._device
        with self._lock:
            if (key, tile, max_warps) in self._known.get(group, {}):  # a transfer's, or there already
                return
            stream = self._aside = self._aside or device.stream()
        table = self._table(group, items, alignment, tile, stream, key, max_warps)
        fresh = table.fresh
        if fresh:
            with Uncaptured(device):
                device.driver.cuEventSynchronize(fresh)
            self._wait(table, stream)

    def function(self, shape: Shape) -> Kernel:
        """Handle, threads and shared memory of the kernel of a shape."""
        made = self._functions.get(shape)
        return aside(partial(self._compile, shape)) if made is None else made

    def _compile(self, shape: Shape) -> Kernel:
        from kvplan.execute.gpu.kernel import compile_kernel

        device = self._device
        with self._compiling, device.current(), Uncaptured(device):  # a lock of its own: it takes long
            made = self._functions.get(shape)
            if made is None:
                compiled = compile_kernel(shape, device.arch)
                module, function = device.load(compiled.image, compiled.name, compiled.shared)
                self._modules.append(module)
                made = self._functions[shape] = (function, compiled.threads, compiled.shared)
        return made

    def close(self) -> None:
        """Unload all; the device is current and nothing in flight."""
        cu = self._device.driver
        for module in self._modules:
            cu.cuModuleUnload(module)
        if self._aside:
            cu.cuStreamDestroy_v2(self._aside)
        for table in (table for tables in self._known.values() for table in tables.values()):
            if table.fresh:
                self._events.append(table.fresh)
                table.fresh = 0
        self._modules.clear()
        self._aside = 0
        self._functions.clear()
        self._known.clear()

    def _make(self, group: RunGroup, items: Int64Array, shape: Shape, kernel: Kernel, stream: int) -> Table:
        """Upload it on the stream that asks; where that is captured, on one aside, else every replay would upload.

        No signal comes in: it is called aside.
        """
        device, slots, memory = self._device, self._slots, self._arena
        if device.capturing(stream):
            stream = self._aside = self._aside or device.stream()
        made = cut(items, shape.width)
        count = made.shape[1]
        source, target = slots.take(made.nbytes), memory.take(made.nbytes)
        source.words[: made.size] = made.ravel()
        fresh = self._event()
        try:
            device.copy(target.address, source.address, made.nbytes, stream)
            device.record(fresh, stream)
        except TransferError:  # the copy may run: its memory stays as it is
            self._events.append(fresh)
            raise
        at, step = target.address, 8 * count
        header = np.array([0, count, 1, 0, 0, at, at + step, at + 2 * step], dtype=np.int64)
        table = Table(shape, kernel, count, header, fresh)
        weakref.finalize(group, _drop, slots, memory, self._events, source, target, table).atexit = False
        return table

    def _event(self) -> int:
        """An event that nothing else uses; called in a thread that no signal comes into."""
        try:
            return self._events.pop()
        except IndexError:
            return self._device.event()

    def _wait(self, table: Table, stream: int) -> None:
        """Let a stream wait for the upload, until it is known to have passed."""
        device = self._device
        with self._lock, Uncaptured(device):
            if not table.fresh:
                return
            if device.capturing(stream):  # a graph may not wait for what is outside it
                device.driver.cuEventSynchronize(table.fresh)
            if device.driver.cuEventQuery(table.fresh) == NOT_READY:
                device.wait(stream, table.fresh)
                return
            fresh, table.fresh = table.fresh, 0  # from here to the end of append no signal is looked at
            self._events.append(fresh)


def _drop(slots: Arena, memory: Arena, events: list[int], source: Piece, target: Piece, table: Table) -> None:
    """Give back what a table had, once its group is gone: no transfer has it in flight any more."""
    slots.give(source)
    memory.give(target)
    fresh, table.fresh = table.fresh, 0  # from here to the end of append no signal is looked at
    if fresh:
        events.append(fresh)

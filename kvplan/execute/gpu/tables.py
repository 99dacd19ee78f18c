"""Run tables in GPU memory, uploaded once per program; and compiled kernels, loaded once per device."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from kvplan.cuda.device import NOT_READY, Device, Uncaptured
from kvplan.execute.gpu.arena import Arena, Handles, Piece
from kvplan.execute.gpu.shape import MAX_WARPS, Shape, cut, shape_of
from kvplan.layout.strides import Int64Array
from kvplan.program.program import RunGroup

Kernel = tuple[int, int, int]  # function, threads of a program, bytes of shared memory
_Entry = tuple[Any, int, int]  # the caller's key for the items, the tile, and the most warps


class Table:
    """The run table of one run group: its items in GPU memory.

    Attributes:
        shape: shape of the kernel that reads the items.
        kernel: function, threads per program and bytes of shared memory of this kernel.
        items: number of items per unit.
        header, words: (9,) int64: the header of a launch, without units; and the same words as Python integers.
        fresh: event behind the upload; 0 after the event is known to have passed.
    """

    def __init__(self, shape: Shape, kernel: Kernel, items: int, header: Int64Array, fresh: int) -> None:
        self.shape = shape
        self.kernel = kernel
        self.items = items
        self.header = header
        self.words: tuple[int, ...] = tuple(header.tolist())
        self.fresh = fresh


class Tables:
    """All run tables of one executor. A table exists as long as its run group; every plan of the group keeps it alive.

    Args:
        device: the GPU.
        lock: lock of the executor.
        handles: streams and events of the executor.
        slots: pinned host memory.
        memory: GPU memory.
    """

    def __init__(self, device: Device, lock: Any, handles: Handles, slots: Arena, memory: Arena) -> None:
        self._device = device
        self._lock = lock
        self._handles = handles
        self._events = handles.unused
        self._slots = slots
        self._arena = memory
        self._known: weakref.WeakKeyDictionary[RunGroup, dict[_Entry, Table]] = weakref.WeakKeyDictionary()
        self._functions: dict[Shape, Kernel] = {}
        self._compiling = threading.RLock()
        self._modules: list[int] = []
        self._aside = 0

    def get(
        self, group: RunGroup, items: Int64Array, alignment: int, tile: int, stream: int, *, key: Any,
        max_warps: int = MAX_WARPS,
    ) -> Table:  # fmt: skip
        """Return the table of (3, n) ``items``, cut to the width of a row. The first call makes and uploads it."""
        table = self._table(group, items, alignment, tile, stream, (key, tile, max_warps))
        if table.fresh:
            self._wait(table, stream)
        return table

    def _table(
        self, group: RunGroup, items: Int64Array, alignment: int, tile: int, stream: int, entry: _Entry
    ) -> Table:  # fmt: skip
        known = self._known.get(group)
        table = None if known is None else known.get(entry)
        if table is None:
            shape = shape_of(alignment, int(items[2].max()), tile, entry[2])
            kernel = self.function(shape)
            table = self._enter(group, items, shape, kernel, stream, entry)
        return table

    def _enter(
        self, group: RunGroup, items: Int64Array, shape: Shape, kernel: Kernel, stream: int, entry: _Entry
    ) -> Table:  # fmt: skip
        device = self._device
        with device.current(), self._lock, Uncaptured(device):
            known = self._known.setdefault(group, {})
            table = known.get(entry)
            if table is None:
                table = known[entry] = self._make(group, items, shape, kernel, stream)
        return table

    def warm_up(
        self, group: RunGroup, items: Int64Array, alignment: int, tile: int, *, key: Any, max_warps: int = MAX_WARPS,
    ) -> None:  # fmt: skip
        """Make a table before the first transfer, on a separate stream, and wait for its upload.

        No transfer keeps the run group alive meanwhile. Without the wait, the upload could write into reused memory.
        """
        device = self._device
        with self._lock:
            entry = (key, tile, max_warps)
            if entry in self._known.get(group, {}):  # a transfer or an earlier warm_up has made it
                return
            stream = self._aside = self._aside or self._handles.stream()
        table = self._table(group, items, alignment, tile, stream, entry)
        fresh = table.fresh
        if fresh:
            with Uncaptured(device):
                device.driver.cuEventSynchronize(fresh)
            self._wait(table, stream)

    def function(self, shape: Shape) -> Kernel:
        """Return function handle, threads per program and bytes of shared memory of the kernel of a shape."""
        made = self._functions.get(shape)
        return self._compile(shape) if made is None else made

    def _compile(self, shape: Shape) -> Kernel:
        device = self._device
        compile_kernel = device.driver.compile_kernel
        if compile_kernel is None:
            from kvplan.execute.gpu import kernel  # only here, since it imports Triton

            compile_kernel = kernel.compile_kernel
        with self._compiling, device.current(), Uncaptured(device):  # not the executor's lock: compiling takes long
            made = self._functions.get(shape)
            if made is None:
                compiled = compile_kernel(shape, device.arch)
                module, function = device.load(compiled.image, compiled.name, compiled.shared)
                self._modules.append(module)
                made = self._functions[shape] = (function, compiled.threads, compiled.shared)
        return made

    def close(self) -> None:
        """Unload all kernels and drop all tables. The device is current, and no transfer is in flight."""
        cu = self._device.driver
        for module in self._modules:
            cu.cuModuleUnload(module)
        self._modules.clear()
        self._functions.clear()
        self._known.clear()

    def _make(self, group: RunGroup, items: Int64Array, shape: Shape, kernel: Kernel, stream: int) -> Table:
        """Make a table and upload it on ``stream``."""
        device, slots, memory = self._device, self._slots, self._arena
        made = cut(items, shape.width)
        count = made.shape[1]
        source, target = slots.take(made.nbytes), memory.take(made.nbytes)
        source.words[: made.size] = made.ravel()
        fresh = self._handles.event()
        try:
            device.copy(target.address, source.address, made.nbytes, stream)
            device.record(fresh, stream)
        except BaseException:  # the copy may still run: its memory is not given back
            self._events.append(fresh)
            raise
        at, step = target.address, 8 * count
        header = np.array([0, count, 1, 0, 0, at, at + step, at + 2 * step, 1], dtype=np.int64)
        table = Table(shape, kernel, count, header, fresh)
        weakref.finalize(group, _drop, slots, memory, self._events, source, target, table).atexit = False
        return table

    def _wait(self, table: Table, stream: int) -> None:
        """Let a stream wait for the upload, unless the upload is known to have ended."""
        device = self._device
        with self._lock, Uncaptured(device):
            if not table.fresh:
                return
            if device.driver.cuEventQuery(table.fresh) == NOT_READY:
                device.wait(stream, table.fresh)
                return
            fresh, table.fresh = table.fresh, 0
            self._events.append(fresh)


def _drop(slots: Arena, memory: Arena, events: list[int], source: Piece, target: Piece, table: Table) -> None:
    """Give back the memory and the event of a table, after its run group is deleted. No transfer uses the table."""
    slots.give(source)
    memory.give(target)
    fresh, table.fresh = table.fresh, 0
    if fresh:
        events.append(fresh)

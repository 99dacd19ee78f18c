"""Run tables in GPU memory, uploaded once per run group; and compiled kernels, loaded once per executor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.process import compiling
from kvplan.cuda.device import Device, Uncaptured
from kvplan.execute.gpu.memory import Arena, Handles
from kvplan.execute.gpu.shape import Shape, cut, shape_of
from kvplan.layout.strides import Int64Array

HEADER = 9  # words of a launch's header
ItemsOf = Callable[[Any], tuple[Int64Array, int]]


class Table(NamedTuple):
    """The run table of one run group: its items in GPU memory.

    Attributes:
        shape: of the kernel that reads the items.
        lines: (1, 15) int64: a launch of it for all units, as :func:`row_loops.write_launches` takes it.
        items: items per unit.
        copies: contiguous copies of a unit, which may be several items each.
    """

    shape: Shape
    lines: Int64Array
    items: int
    copies: int


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
        self._known: weakref.WeakKeyDictionary[object, dict[tuple[ItemsOf, int, int], Table]] = (
            weakref.WeakKeyDictionary()
        )
        self._kernels: dict[Shape, tuple[int, int, int, int]] = {}
        self._lock = threading.RLock()  # compiling takes long, so it is not the executor's lock
        self._modules: list[int] = []
        self._stream = 0

    def get(self, group: Any, items_of: ItemsOf, tile: int, warps: int) -> Table:
        """Return the table of a run group's items, cut to the width of a row. The first call makes it, and blocks.

        Args:
            group: the run group, or what else the table lives as long as.
            items_of: returns the items of the group, (3, n) int64: source offset, destination offset and bytes of each
                copy of a unit; and the number of bytes that divides all addresses and sizes.
            tile, warps: bytes in flight per program, and most warps of a program.
        """
        known, entry = self._known.get(group), (items_of, tile, warps)
        table = None if known is None else known.get(entry)
        if table is not None:
            return table
        with self._lock, self._device.current(), Uncaptured(self._device):
            known = self._known.setdefault(group, {})
            if entry not in known:
                items, alignment = items_of(group)
                shape = shape_of(alignment, int(items[2].max()), tile, warps)
                pieces = cut(items, shape.width)
                known[entry] = Table(shape, self._lines(group, pieces, shape), pieces.shape[1], items.shape[1])
        return known[entry]

    def _lines(self, group: object, items: Int64Array, shape: Shape) -> Int64Array:
        """Upload items and wait for their arrival: afterwards nothing depends on it."""
        kernel, device = self._kernel(shape), self._device
        self._stream = self._stream or self._handles.stream(urgent=True)
        source, target = self._slots.take(items.nbytes), self._arena.take(items.nbytes)
        event = self._handles.event()
        source.words[: items.size] = items.ravel()
        device.copy(target.address, source.address, items.nbytes, self._stream)  # if it fails, no memory is used again
        device.record(event, self._stream)
        device.synchronize(event)
        self._handles.unused.append(event)
        source.free.append(source)
        weakref.finalize(group, target.free.append, target).atexit = False
        at, step = target.address, 8 * items.shape[1]
        header = 0, items.shape[1], 1, 0, 0, at, at + step, at + 2 * step, 1
        return np.array([(*header, *kernel, 0, -1)], dtype=np.int64)

    def _kernel(self, shape: Shape) -> tuple[int, int, int, int]:
        """Return the kernel of a shape. The first call compiles and loads it."""
        device = self._device
        if shape not in self._kernels:
            compile_kernel = device.driver.compile_kernel
            if compile_kernel is None:
                from kvplan.execute.gpu import kernel  # only here, since it imports Triton

                compile_kernel = kernel.compile_kernel
            with compiling():
                compiled = compile_kernel(shape, device.arch)
            module, function = device.load(compiled.image, compiled.name, compiled.shared)
            self._modules.append(module)
            self._kernels[shape] = function, compiled.threads, compiled.shared, shape.rows
        return self._kernels[shape]

    def close(self) -> None:
        """Unload all kernels and drop all tables. The device is current, and no transfer is in flight."""
        for module in self._modules:
            self._device.driver.cuModuleUnload(module)
        self._modules.clear()
        self._kernels.clear()
        self._known.clear()

"""Run tables in GPU memory, uploaded once per run group; and compiled kernels, loaded once per executor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from kvplan.base.process import compiling
from kvplan.cuda.device import Device, Uncaptured
from kvplan.execute.gpu.memory import Arena, Handles
from kvplan.execute.gpu.shape import Shape, cut, shape_of
from kvplan.layout.strides import Int64Array

HEADER = 9  # words of a launch's header


class Table(NamedTuple):
    """The run table of one run group: its items in GPU memory.

    Attributes:
        shape: of the kernel that reads the items.
        line: (13,) int64: the header of a launch, without units; then function, threads of a program, bytes of shared
            memory of a program, and rows of a tile. Word 1 is the number of items per unit.
        copies: contiguous copies of a unit, which may be several items each.
    """

    shape: Shape
    line: Int64Array
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
        self._known: weakref.WeakKeyDictionary[object, dict[Hashable, Table]] = weakref.WeakKeyDictionary()
        self._kernels: dict[Shape, tuple[int, int, int, int]] = {}
        self._lock = threading.RLock()  # compiling takes long, so it is not the executor's lock
        self._modules: list[int] = []
        self._stream = 0
        self._finalizers: list[weakref.finalize[..., object]] = []  # which give the memory of tables back

    def get(
        self, group: object, items: Int64Array, alignment: int, tile: int, *, key: Hashable, warps: int
    ) -> Table:  # fmt: skip
        """Return the table of (3, n) ``items``, cut to the width of a row. The first call makes it, and blocks.

        Args:
            group: the run group, or what else the table lives as long as.
            items: source offset, destination offset and bytes of each copy of a unit.
            alignment: number of bytes that divides all addresses and sizes.
            tile, warps: bytes in flight per program, and most warps of a program.
            key: tells the items of the same run group apart.
        """
        known, entry = self._known.get(group), (key, tile, warps)
        if known is None or entry not in known:
            with self._lock, self._device.current(), Uncaptured(self._device):
                known = self._known.setdefault(group, {})
                if entry not in known:
                    shape = shape_of(alignment, int(items[2].max()), tile, warps)
                    line = self._line(group, cut(items, shape.width), shape)
                    known[entry] = Table(shape, line, items.shape[1])
        return known[entry]

    def _line(self, group: object, items: Int64Array, shape: Shape) -> Int64Array:
        """Upload items and wait for their arrival: afterwards nothing depends on it."""
        kernel, device = self._kernel(shape), self._device
        self._stream = self._stream or self._handles.stream(urgent=True)
        source, target, (event,) = (
            self._slots.take(items.nbytes),
            self._arena.take(items.nbytes),
            self._handles.events(1),
        )
        source.words[: items.size] = items.ravel()
        device.copy(target.address, source.address, items.nbytes, self._stream)  # if it fails, no memory is used again
        device.record(event, self._stream)
        device.synchronize(event)
        self._handles.unused.append(event)
        source.free.append(source)
        self._finalizers = [one for one in self._finalizers if one.alive]
        self._finalizers.append(weakref.finalize(group, target.free.append, target))
        self._finalizers[-1].atexit = False
        at, step = target.address, 8 * items.shape[1]
        return np.array([0, items.shape[1], 1, 0, 0, at, at + step, at + 2 * step, 1, *kernel], dtype=np.int64)

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
        for finalizer in self._finalizers:
            finalizer.detach()
        for module in self._modules:
            self._device.driver.cuModuleUnload(module)
        self._modules.clear()
        self._kernels.clear()
        self._known.clear()

"""What one GPU's executor reuses: memory, events and streams, run tables in GPU memory, and kernels that read them."""

from __future__ import annotations

import ctypes
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from kvplan.cost.policy import Policy
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.issuer import Issuer
from kvplan.cuda.reach import Reach
from kvplan.execute.backend import Backend
from kvplan.layout.strides import Int64Array

SMALLEST = 4 << 10  # bytes of a piece of memory
CARVED = 1 << 20  # smaller pieces are cut from blocks of this many bytes
WORDS = (16, 8, 4, 2, 1)  # bytes of a kernel's loads and stores
LANES = 32  # threads per warp
# Words in flight per thread. With an address for each word, registers hold four of them at 32 warps. If all words of a
# thread are of one row, registers hold eight.
IN_FLIGHT, MOST_IN_FLIGHT = 4, 8
MAX_WARPS = 32
MAX_ROWS = 1024


class Piece(NamedTuple):
    """A stretch of memory.

    Attributes:
        address: address of the first byte.
        nbytes: number of bytes.
        words: the same memory as int64 if the CPU can reach it; otherwise empty.
        free: the list of free pieces that it goes back to.
    """

    address: int
    nbytes: int
    words: Int64Array
    free: deque[Any]


class Arena:
    """Memory in pieces of a few sizes, which are reused. Any thread may take pieces and give them back, without a lock.

    Args:
        allocate: allocates a number of bytes and returns their address.
        free: frees the memory at an address.
        visible: whether the CPU can reach the memory.
    """

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None], *, visible: bool) -> None:
        self._allocate, self._free_block, self._visible = allocate, free, visible
        self._blocks: dict[int, int] = {}  # bytes by address
        self._free: dict[int, deque[Piece]] = {}

    @property
    def nbytes(self) -> int:
        """Return the number of allocated bytes."""
        return sum(self._blocks.copy().values())

    def take(self, nbytes: int, *, exact: bool = False) -> Piece:
        """Take a piece of at least ``nbytes`` bytes; if ``exact``, for one that is large and kept long, of no more."""
        size = nbytes if exact else rounded(nbytes) if nbytes > SMALLEST else SMALLEST
        free = self._free.get(size)
        if free is None:
            free = self._free.setdefault(size, deque())
        while True:
            try:
                return free.pop()  # the piece given back last, which may still be in the CPU's cache
            except IndexError:
                self._carve(size, free)

    def _carve(self, size: int, free: deque[Piece]) -> None:
        """Allocate a block and cut it into free pieces."""
        block = max(size, CARVED)
        address = self._allocate(block)
        self._blocks[address] = block
        words = np.empty(0, np.int64)
        if self._visible:
            words = np.frombuffer((ctypes.c_int64 * (block // 8)).from_address(address), np.int64)
        starts = range(0, block - size + 1, size)
        free.extend([Piece(address + at, size, words[at // 8 : (at + size) // 8], free) for at in starts])

    def trim(self) -> None:
        """Free the large blocks that nobody uses."""
        for size, free in list(self._free.items()):
            with suppress(IndexError):  # none is left
                while size > CARVED:
                    address = free.pop().address
                    del self._blocks[address]
                    self._free_block(address)

    def close(self) -> None:
        """Free all memory. No piece may be in use."""
        while self._blocks:
            self._free_block(self._blocks.popitem()[0])
        self._free.clear()


def rounded(nbytes: int) -> int:
    """Return the size of the smallest piece that holds a number of bytes.

    Small sizes are powers of two. Large sizes are multiples of a quarter of a power of two, so that little is wasted.

    >>> rounded(1), rounded(5000), rounded((5 << 20) + 1) >> 20
    (4096, 8192, 6)
    """
    if nbytes > CARVED:
        quarter = 1 << ((nbytes - 1).bit_length() - 3)
        return -(-nbytes // quarter) * quarter
    return max(SMALLEST, 1 << (nbytes - 1).bit_length())


class Shape(NamedTuple):
    """One variant of the kernel.

    Attributes:
        word: bytes per load or store: 16, 8, 4, 2 or 1.
        width: bytes of a row in flight at once; a power of two.
        rows: rows per tile; a power of two.
        warps: warps per program.
        split: number of accesses per width. If each warp has one row, warps never wait for each other.
    """

    word: int
    width: int
    rows: int
    warps: int
    split: int


def shape_of(alignment: int, longest: int, tile: int, max_warps: int = MAX_WARPS) -> Shape:
    """Return the variant of the kernel for items of some size.

    Args:
        alignment: number of bytes that divides every address and size.
        longest: bytes of the longest item.
        tile: bytes that a program should have in flight; a power of two. With small words, fewer are in flight.
        max_warps: most warps per program.

    >>> shape_of(256, 8192, 128 << 10)
    Shape(word=16, width=4096, rows=32, warps=32, split=8)
    >>> shape_of(256, 2048, 32 << 10)
    Shape(word=16, width=2048, rows=16, warps=16, split=4)
    >>> shape_of(16, 512, 64 << 10)
    Shape(word=16, width=512, rows=128, warps=32, split=1)
    >>> shape_of(1, 7, 64 << 10)
    Shape(word=1, width=16, rows=256, warps=32, split=1)
    """
    word = next(word for word in WORDS if alignment % word == 0)
    a_warp = LANES * word  # bytes of one access
    warps = max(1, min(max_warps, tile // (IN_FLIGHT * a_warp)))
    most = MOST_IN_FLIGHT if tile >= MOST_IN_FLIGHT * a_warp * warps else IN_FLIGHT
    width = min(max(1 << (longest - 1).bit_length(), word, 16), most * a_warp, tile)
    split = max(1, width // a_warp)
    if split >= IN_FLIGHT:
        return Shape(word, width, warps, warps, split)
    rows = min(tile, IN_FLIGHT * a_warp * warps) // width
    return Shape(word, width, max(1, min(rows, MAX_ROWS)), warps, split)


def cut(items: Int64Array, longest: int) -> Int64Array:
    """Cut items of more than ``longest`` bytes into pieces. Their lengths are as equal as multiples of 16 bytes allow.

    Args:
        items: (3, n) int64: source offset, destination offset, bytes.

    >>> cut(np.array([[0, 10000], [0, 20000], [100, 3000]]), 2048)
    array([[    0, 10000, 11504],
           [    0, 20000, 21504],
           [  100,  1504,  1496]])
    """
    size = items[2]
    if not size.size or int(size.max()) <= longest:
        return items
    pieces = -(-size // longest)
    each = np.minimum((size + 16 * pieces - 1) // (16 * pieces) * 16, longest)
    pieces = -(-size // each)
    index = np.repeat(np.arange(size.size), pieces)
    at = (np.arange(index.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * each[index]
    return np.stack((items[0, index] + at, items[1, index] + at, np.minimum(each[index], size[index] - at)))


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


class Resources(Backend):
    """The parts of an executor that its lanes, paths and transfers use.

    Args:
        device: the GPU.
        policy: the caller's policy.
        lent: returns the handle of the caller's stream for all kernels, or None; called at the first kernel of a lane.

    Attributes:
        lock: guards everything but the arenas and the tables.
        events: those that no transfer uses; the event given back last is taken first.
        pinned, memory: its pinned memory and GPU memory.
        reach: tells which memory the GPU reaches.
        issuers: by direction, the thread that makes the calls of long transfers.
    """

    def __init__(self, device: Device, policy: Policy, lent: Callable[[], int | None]) -> None:
        super().__init__("kvplan-reaper", "no thread keeps what a GPU executor has in flight")
        self.device, self.policy, self.lent = device, policy, lent
        self.events: list[int] = []
        self._undo = ExitStack()  # of streams, events and kernels
        self.pinned = Arena(device.allocate_host, device.free_host, visible=True)
        self.memory = Arena(device.allocate, device.free, visible=False)
        self.reach = Reach(device)
        self.issuers: dict[str, Issuer] = {}
        # A table exists as long as its run group; every plan of the group keeps it alive.
        self._tables: weakref.WeakKeyDictionary[Any, dict[Any, Table]] = weakref.WeakKeyDictionary()
        self._making = threading.RLock()  # compiling takes long, so it is not the executor's lock
        self._kernels: dict[Shape, tuple[int, int, int, int]] = {}
        self._uploads = 0  # a stream

    @abstractmethod
    def compile_kernel(self, shape: Shape) -> Any:
        """Return the kernel of a shape, compiled for the GPU; see :class:`kvplan.execute.gpu.kernel.Compiled`."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Make the device current within a ``with``, and allow calls that a capture forbids.

        The lock stands beside it in each ``with``: taken in here, Ctrl-C could leave it held.
        """
        with self.device.current(), Uncaptured(self.device):
            yield

    def stream(self, *, urgent: bool) -> int:
        """Make a stream, which lives until the executor has ended. The device is current."""
        stream = self.device.stream(urgent=urgent)
        self._undo.callback(self.device.driver.cuStreamDestroy_v2, stream)
        return stream

    def event(self) -> int:
        """Return an unused event, or a new one, which lives until the executor has ended. The device is current."""
        try:
            return self.events.pop()
        except IndexError:
            event = self.device.event()
            self._undo.callback(self._destroy, event)
            return event

    def _destroy(self, event: int) -> None:
        if not self.device.driver.cuEventQuery(event):  # an interrupted submit may have left one on another stream
            self.device.driver.cuEventDestroy_v2(event)

    def table(self, group: Any, items_of: Callable[[Any], tuple[Int64Array, int]], tile: int, warps: int) -> Table:
        """Return the table of a run group's items, cut to the width of a row. The first call makes it, and blocks.

        Args:
            group: the run group, or what else the table lives as long as.
            items_of: returns the items of the group, (3, n) int64: source offset, destination offset and bytes of each
                copy of a unit; and the number of bytes that divides all addresses and sizes.
            tile, warps: bytes in flight per program, and most warps of a program.
        """
        key = items_of, tile, warps
        try:
            return self._tables[group][key]
        except KeyError:
            pass
        with self._making, self.device.current(), Uncaptured(self.device):
            tables = self._tables.setdefault(group, {})
            if key not in tables:
                items, alignment = items_of(group)
                shape = shape_of(alignment, int(items[2].max()), tile, warps)
                pieces = cut(items, shape.width)
                tables[key] = Table(shape, self._lines(group, pieces, shape), pieces.shape[1], items.shape[1])
        return tables[key]

    def _lines(self, group: object, items: Int64Array, shape: Shape) -> Int64Array:
        """Upload items and wait for their arrival: afterwards nothing depends on it."""
        device, kernel, event = self.device, self._kernel(shape), self.event()
        self._uploads = self._uploads or self.stream(urgent=True)
        source, target = self.pinned.take(items.nbytes), self.memory.take(items.nbytes)
        source.words[: items.size] = items.ravel()
        device.copy(target.address, source.address, items.nbytes, self._uploads)  # if it fails, no memory is used again
        device.record(event, self._uploads)
        device.synchronize(event)
        self.events.append(event)
        source.free.append(source)
        weakref.finalize(group, target.free.append, target).atexit = False
        at, step = target.address, 8 * items.shape[1]
        header = 0, items.shape[1], 1, 0, 0, at, at + step, at + 2 * step, 1
        return np.array([(*header, *kernel, 0, -1)], dtype=np.int64)

    def _kernel(self, shape: Shape) -> tuple[int, int, int, int]:
        """Return the kernel of a shape. The first call compiles and loads it."""
        if shape not in self._kernels:
            compiled = self.compile_kernel(shape)
            module, function = self.device.load(compiled.image, compiled.name, compiled.shared)
            self._undo.callback(self.device.driver.cuModuleUnload, module)
            self._kernels[shape] = function, compiled.threads, compiled.shared, shape.rows
        return self._kernels[shape]

    def issuer(self, direction: str) -> Issuer:
        """Return the thread that makes the calls of long transfers of a direction; the first call starts it."""
        if direction not in self.issuers:
            self.issuers[direction] = Issuer(self.device, f"kvplan-issue-{direction}", [self.event() for _ in range(4)])
        return self.issuers[direction]

    def held(self) -> tuple[int, int]:
        """Return the bytes of GPU memory and of pinned memory that it holds."""
        return self.memory.nbytes, self.pinned.nbytes

    def trim(self) -> None:
        """Free large pieces of memory that nobody uses."""
        with self.inside(), self.lock:
            self.pinned.trim()
            self.memory.trim()

    def tear_down(self) -> None:
        """Give everything back to the driver. No transfer is in flight."""
        for issuer in self.issuers.values():
            issuer.stop()
            issuer.thread.join()
        with self.inside(), self.lock:
            self._undo.close()
            self.pinned.close()
            self.memory.close()

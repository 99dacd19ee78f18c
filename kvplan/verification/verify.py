"""Verification on live pools: a real transfer moves markers, which are compared with the layouts' addresses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from kvplan.base.values import optional_integer
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.execute.executor import Executor
from kvplan.layout.components import Component
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import Row, row_in_words, row_of
from kvplan.layout.strides import Int64Array, extent
from kvplan.plan.copy_program import compile_quietly
from kvplan.plan.placement import own_block_ids
from kvplan.plan.plan import Plan
from kvplan.program.matching import Pair, match
from kvplan.verification.raw_bytes import Bytes, Contents, addresses_of

MAX_NBYTES = 64 << 20  # most bytes that one verification moves
DEFAULT_NBYTES, DEFAULT_BLOCKS = 4 << 20, 8

Side = Literal[0, 1]  # source, destination


@dataclass(frozen=True, slots=True)
class Verification:
    """The findings of :func:`kvplan.verify`.

    Attributes:
        ok: whether every byte arrived at its place, and nothing else in the written blocks changed.
        text: the findings in words, with the first wrong byte; ``str`` returns it.
        blocks: ids of the blocks read, and of the blocks written.
        nbytes: number of bytes that were moved and compared.
        wrong_nbytes: number of those that are wrong.
        row: coordinate in the destination of the first wrong byte, or None.
    """

    ok: bool
    text: str
    blocks: tuple[tuple[int, ...], tuple[int, ...]]
    nbytes: int
    wrong_nbytes: int = 0
    row: Row | None = None

    def __str__(self) -> str:
        return self.text


def verify(
    src: KVLayout,
    dst: KVLayout,
    *,
    executor: Any = None,
    blocks: int | tuple[Any, Any] | None = None,
    reinterpret: bool = False,
) -> Verification:
    """Move markers with real transfers, and compare every byte with :meth:`kvplan.KVLayout.address` of both layouts.

    A marker encodes the coordinate of its byte, so a byte in a wrong place shows its origin. It is one byte a transfer,
    so there are two to four of them. The content of the blocks is saved before and restored after, also after an error;
    no other code may use them meanwhile. The other content of the written blocks is compared with what it was.

    It takes both layouts as given. It cannot know that a layout has K and V, or tokens and heads, the wrong way round.

    Args:
        src: layout to read, of a pool in memory.
        dst: layout to write, likewise.
        executor: moves the plans; by default the host path, for two layouts in CPU memory.
        blocks: number of blocks of the side with the larger blocks; or ``(src_ids, dst_ids)``, such as an engine's free
            blocks. By default the first blocks: at most 8, and at most 4 MiB.
        reinterpret: whether bytes of one number format may be read as another one; see :func:`kvplan.compile`.

    Raises:
        IncompatibleLayoutsError: the layouts do not compile.
        BlockIndexError: a block does not exist, a source block is named twice, or the sides cover different tokens.
        OverlapError: a destination block is named twice.
        LayoutError: addresses are not this process's, memory is read-only, or more than 64 MiB would move.
        KVPlanError: layouts are on a GPU and no executor is given; or the executor raises it.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("kv block token head dim", np.zeros((2, 8, 16, 2, 64), np.int8))
    >>> pool = kvplan.allocate("block kv head token dim", like=gpu, num_blocks=4, block_tokens=32)
    >>> found = kvplan.verify(gpu, pool)
    >>> found.ok, found.text
    (True, '32,768 bytes arrived where they belong')
    """
    for name, what, layout in (("src", "read", src), ("dst", "write", dst)):
        if not isinstance(layout, KVLayout):
            raise LayoutError(
                f"{name} is a {type(layout).__name__}; give the layout to {what}: verify takes two layouts of pools in "
                "memory, as KVLayout.from_tensors makes them"
            )
    program = compile_quietly(src, dst, reinterpret=reinterpret)
    for layout in (src, dst):
        if not layout.writable:
            raise LayoutError(
                f"{layout!r} holds a read-only array; verification writes to it and restores it, so give a writable one"
            )
    ids = _chosen(src, dst, blocks)
    plan = program.plan(*ids)
    if plan.nbytes > MAX_NBYTES:
        raise LayoutError(f"the blocks hold {plan.nbytes:,} bytes; a verification moves at most {MAX_NBYTES:,}")
    if len(set(ids[0].tolist())) != len(ids[0]):
        raise BlockIndexError(
            "src_blocks name a block more than once; give each block once, since it holds one set of markers"
        )
    if executor is None and (src.device, dst.device) != ("cpu", "cpu"):
        raise KVPlanError(
            f"verification from {src.device} to {dst.device} takes an executor of that GPU: verify(..., executor=...)"
        )
    with Executor(device="cpu") if executor is None else contextlib.nullcontext(executor) as mover:
        return _Markers(src, dst, ids).verify(mover, plan)


def _chosen(src: KVLayout, dst: KVLayout, blocks: Any) -> tuple[Int64Array, Int64Array]:
    """Return the block ids of both sides."""
    if isinstance(blocks, tuple | list) and len(blocks) == 2:
        return own_block_ids(blocks[0], "src_blocks"), own_block_ids(blocks[1], "dst_blocks")
    right = "give a number of at least 1, or (src_ids, dst_ids)"
    counts = block_counts(src, dst, optional_integer("blocks", blocks, least=1, right=right, error=BlockIndexError))
    return np.arange(counts[0], dtype=np.int64), np.arange(counts[1], dtype=np.int64)


def block_counts(src: KVLayout, dst: KVLayout, blocks: int | None) -> tuple[int, int]:
    """Return the number of blocks of each side that cover ``blocks`` larger blocks, or the whole smaller layout."""
    larger = max(src.block_tokens, dst.block_tokens)
    if blocks is None:
        block_nbytes = min(src.block_nbytes // src.block_tokens, dst.block_nbytes // dst.block_tokens) * larger
        blocks = max(1, min(DEFAULT_BLOCKS, DEFAULT_NBYTES // max(block_nbytes, 1)))
    tokens = min(blocks * larger, *(side.num_blocks * side.block_tokens for side in (src, dst)))
    return -(-tokens // src.block_tokens), -(-tokens // dst.block_tokens)


class _Moved(NamedTuple):
    """The moved bytes of one pair of components, as (tokens, heads, bytes); they are numbered over all pairs."""

    pair: Pair
    first: int  # number of its first byte
    shape: tuple[int, int, int]

    def numbers(self) -> Int64Array:
        return np.arange(self.first, self.first + int(np.prod(self.shape)), dtype=np.int64).reshape(self.shape)

    def placed(self, side: Side) -> tuple[Component, int, int]:
        """Return the component of one side, and its first moved head and byte, counted from 0."""
        pair = self.pair
        component, dim = (pair.src, pair.src_dim) if side == 0 else (pair.dst, pair.dst_dim)
        headed = pair.src.form.headed and pair.dst.form.headed
        return component, pair.heads.start - component.form.head_start if headed else 0, dim


class _Markers:
    """The bytes that a plan moves: their addresses on both sides, the content before, and the markers."""

    def __init__(self, src: KVLayout, dst: KVLayout, ids: tuple[Int64Array, Int64Array]) -> None:
        self.ids, self.dst_components = ids, dst.components
        self.memory = Contents(src), Contents(dst)
        self.moved: list[_Moved] = []
        self.nbytes = 0
        for pair in match(src.geometry, dst.geometry):
            held = (pair.src.form, ids[0]), (pair.dst.form, ids[1])
            tokens = min(len(some) * extent(form.token) for form, some in held)
            self.moved.append(_Moved(pair, self.nbytes, (tokens, len(pair.heads), pair.nbytes)))
            self.nbytes += int(np.prod(self.moved[-1].shape))
        self.rounds = 2
        while self.nbytes > 256**self.rounds:
            self.rounds += 1

    def verify(self, executor: Any, plan: Plan) -> Verification:
        """Make all transfers, restore what was there, and return the findings."""
        _settle()
        before = [self._read(0), self._read(1)]
        blocks = [self.memory[1].read(at) for _, at in self._whole_blocks()]
        arrived: list[list[Bytes]] = []
        beside: list[tuple[Component, tuple[int, ...]]] = []
        try:
            for number in reversed(range(self.rounds)):  # bytes that differ most come last, and show what is beside
                markers = [self._markers(one, number) for one in self.moved]
                self._write(0, markers)
                self._write(1, [~marker for marker in markers])  # what does not arrive must not look as if it had
                _settle()
                _move(executor, plan)
                _settle()
                arrived.insert(0, self._read(1))
        finally:
            self._write(0, before[0])
            self._write(1, before[1])
            for (component, at), held in zip(self._whole_blocks(), blocks, strict=True):
                changed = np.argwhere(self.memory[1].read(at) != held)
                if len(changed):
                    beside.append((component, tuple(changed[0].tolist())))
                    self.memory[1].write(at, held)
            _settle()
        return self._judge(arrived, beside)

    def _markers(self, one: _Moved, number: int) -> Bytes:
        """Return one byte of the number of each byte."""
        return (one.numbers() >> 8 * number).astype(np.uint8)

    def _addresses(self, one: _Moved, side: Side) -> Int64Array:
        component, head, dim = one.placed(side)
        tokens, heads, nbytes = (np.arange(count, dtype=np.int64) for count in one.shape)
        blocks, slots = np.divmod(tokens, extent(component.form.token))
        return addresses_of(component, self.ids[side][blocks], slots, heads + head, nbytes + dim)

    def _whole_blocks(self) -> Iterator[tuple[Component, Int64Array]]:
        """Yield the addresses of all content of the written blocks, moved or not: (tokens, heads, bytes)."""
        for component in self.dst_components:
            tokens, heads, dim = (
                extent(axis) for axis in (component.form.token, component.form.head, component.form.dim)
            )
            blocks, slots = np.repeat(self.ids[1], tokens), np.tile(np.arange(tokens), len(self.ids[1]))
            yield component, addresses_of(component, blocks, slots, np.arange(heads), np.arange(dim))

    def _read(self, side: Side) -> list[Bytes]:
        return [self.memory[side].read(self._addresses(one, side)) for one in self.moved]

    def _write(self, side: Side, values: list[Bytes]) -> None:
        for one, held in zip(self.moved, values, strict=True):
            self.memory[side].write(self._addresses(one, side), held)

    def _row(self, one: _Moved, at: tuple[int, ...], side: Side) -> Row:
        """Return the coordinate of one moved byte, given as (token, head, byte)."""
        (component, head, dim), (token, number, byte) = one.placed(side), at
        block, slot = divmod(token, extent(component.form.token))
        return row_of(component, (int(self.ids[side][block]), slot, number + head, byte + dim))

    def _judge(self, arrived: list[list[Bytes]], beside: list[tuple[Component, tuple[int, ...]]]) -> Verification:
        wrong_nbytes, row, said = 0, None, ""
        for k, one in enumerate(self.moved):
            held = np.add.reduce([some[k].astype(np.int64) << 8 * number for number, some in enumerate(arrived)])
            wrong = np.argwhere(held != one.numbers())
            wrong_nbytes += len(wrong)
            if row is None and len(wrong):
                at = tuple(wrong[0].tolist())
                row = self._row(one, at, 1)
                said = (
                    f"{_words(row)} of the destination should hold {_words(self._row(one, at, 0))} of the source, and "
                )
                said += self._instead(int(held[at]), one, at)
        if row is None and beside:
            component, (token, head, byte) = beside[0]
            block, slot = divmod(token, extent(component.form.token))
            row = row_of(component, (int(self.ids[1][block]), slot, head, byte))
            said = f"{_words(row)} of the destination was written, though nothing belongs there"
        ids = (tuple(self.ids[0].tolist()), tuple(self.ids[1].tolist()))
        text = f"{wrong_nbytes:,} of {self.nbytes:,} bytes are wrong: {said}"
        if row is None:
            text = f"{self.nbytes:,} bytes arrived where they belong"
        return Verification(row is None, text, ids, self.nbytes, wrong_nbytes, row)

    def _instead(self, number: int, one: _Moved, at: tuple[int, ...]) -> str:
        """Say what arrived in place of a byte: the byte of this number, nothing, or no marker at all."""
        if number == 256**self.rounds - 1 - int(one.numbers()[at]):
            return "nothing arrived"
        if number >= self.nbytes:
            return "holds something else"
        origin = next(some for some in reversed(self.moved) if some.first <= number)
        there = tuple(int(k) for k in np.unravel_index(number - origin.first, origin.shape))
        return f"holds {_words(self._row(origin, there, 0))}"


def _words(row: Row) -> str:
    return row_in_words(row, byte=True)


def _move(executor: Any, plan: Plan) -> None:
    """Make one transfer to its end. Even if the wait fails, no transfer is in flight when memory is restored."""
    transfer = executor.submit(plan)
    try:
        transfer.result()
    except BaseException:
        with contextlib.suppress(Exception):
            transfer.synchronize()
        raise


def _settle() -> None:
    """Wait until torch's queued work on GPUs is done, before bytes are read or moved."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)

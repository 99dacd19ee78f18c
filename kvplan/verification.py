"""Verification on live pools: markers through a real transfer, held against the layouts' own addresses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from kvplan.algebra import extent
from kvplan.blockmap import block_ids
from kvplan.compiler import Pair, match
from kvplan.components import Component
from kvplan.contents import Bytes, Contents, addresses_of
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.execute import Executor
from kvplan.facade import compile  # noqa: A004
from kvplan.layout import KVLayout
from kvplan.program import Int64Array
from kvplan.where import Row
from kvplan.wording import row_in_words

MAX_NBYTES = 64 << 20  # that one verification moves at most
DEFAULT_NBYTES, DEFAULT_BLOCKS = 4 << 20, 8


@dataclass(frozen=True, slots=True)
class Verification:
    """What :func:`verify` found.

    Attributes:
        ok: whether every byte arrived where it belongs, and none elsewhere in the blocks written.
        blocks: blocks read, and blocks written, by id.
        nbytes: bytes held against what they should be.
        markers: whether the source held markers; else its own content was moved, in which equal rows look alike.
        rounds: transfers it took: a marker is one byte, and a coordinate takes several.
        wrong_nbytes: bytes that are wrong.
        row: coordinate in the destination of the first wrong byte, or None.
        held: coordinate in the source of what that byte holds instead, where markers tell.
        wrong: the same in words, or None.
    """

    ok: bool
    blocks: tuple[tuple[int, ...], tuple[int, ...]]
    nbytes: int
    markers: bool
    rounds: int
    wrong_nbytes: int = 0
    row: Row | None = None
    held: Row | None = None
    wrong: str | None = None


class _Match(NamedTuple):
    """One pair of components, and where each of its bytes lies on both sides: (tokens, heads, bytes)."""

    pair: Pair
    first: int  # number of its first byte, over all pairs
    shape: tuple[int, int, int]


def verify(
    src: KVLayout,
    dst: KVLayout,
    *,
    executor: Any = None,
    blocks: int | tuple[Any, Any] | None = None,
    markers: bool = True,
) -> Verification:
    """Move blocks as a transfer would, and hold every byte against :meth:`kvplan.KVLayout.address` of both layouts.

    The blocks that it writes are saved before and put back, also where something raises; nothing else may use them
    meanwhile. What a wrong executor writes beside the rows that are compared is neither seen nor put back. What arrives
    is compared byte by byte on the CPU, at some ten million bytes a second.

    Args:
        src: layout to read; written and put back, unless ``markers`` is False.
        dst: layout to write.
        executor: what moves plans; by default the host path, for two layouts in CPU memory.
        blocks: how many blocks of the side whose blocks are larger; or ``(src_ids, dst_ids)``, say those that an engine
            has free. By default the first 8, or as many as there are, or as hold 4 MiB.
        markers: write to the source blocks, too, and put them back: each byte tells its coordinate, so that no two look
            alike and what lies in the wrong place tells where it came from. Without, the source's own content moves,
            and rows that hold the same, as those of an empty pool do, are not told apart.

    Raises:
        IncompatibleLayoutsError: the two do not compile.
        BlockIndexError, OverlapError: blocks that are none, that are named twice, or that cover different tokens.
        LayoutError: virtual addresses, read-only memory, or more than 64 MiB to move.
        KVPlanError: layouts on a GPU without an executor. What the executor raises is passed on.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("kv block token head dim", np.zeros((2, 8, 16, 2, 64), np.int8))
    >>> pool = kvplan.allocate("block kv head token dim", like=gpu, num_blocks=4, block_tokens=32)
    >>> found = kvplan.verify(gpu, pool, markers=True)
    >>> found.ok, found.nbytes, found.wrong
    (True, 32768, None)
    """
    program = compile(src, dst)
    for layout, written in ((src, markers), (dst, True)):
        if written and not layout.writable:
            raise LayoutError(
                f"{layout!r} holds a read-only array; verification writes to it, and puts back what it held"
            )
    ids = _chosen(src, dst, blocks)
    plan = program.plan(*ids)
    if plan.nbytes > MAX_NBYTES:
        raise LayoutError(f"the blocks hold {plan.nbytes:,} bytes; a verification moves at most {MAX_NBYTES:,}")
    if len(set(ids[0].tolist())) != len(ids[0]):
        raise BlockIndexError("src_blocks name a block more than once; a block holds one set of markers")
    own = executor is None
    if own and (src.device, dst.device) != ("cpu", "cpu"):
        raise KVPlanError(f"from {src.device} to {dst.device} takes an executor of that GPU: verify(..., executor=...)")
    mover = Executor(device="cpu") if own else executor
    try:
        return _Verifying(src, dst, ids, markers=markers).run(mover, plan)
    finally:
        if own:
            mover.close()


def _chosen(src: KVLayout, dst: KVLayout, blocks: Any) -> tuple[Int64Array, Int64Array]:
    """Block ids of both sides."""
    if isinstance(blocks, tuple | list) and len(blocks) == 2:
        return block_ids(blocks[0], "src_blocks"), block_ids(blocks[1], "dst_blocks")
    check_blocks(blocks)
    counts = block_counts(src, dst, blocks)
    return np.arange(counts[0], dtype=np.int64), np.arange(counts[1], dtype=np.int64)


def check_blocks(blocks: Any) -> None:
    """A number of blocks, or None.

    Raises:
        BlockIndexError: it is none.
    """
    if blocks is not None and (isinstance(blocks, bool) or not hasattr(blocks, "__index__") or blocks < 1):
        raise BlockIndexError(f"blocks is {blocks!r}; give a number of at least 1, or (src_ids, dst_ids)")


def block_counts(src: KVLayout, dst: KVLayout, blocks: int | None) -> tuple[int, int]:
    """How many blocks of each side cover ``blocks`` of the larger ones, or as many as there are on both."""
    larger = max(src.block_tokens, dst.block_tokens)
    if blocks is None:
        block_nbytes = min(src.block_nbytes // src.block_tokens, dst.block_nbytes // dst.block_tokens) * larger
        blocks = max(1, min(DEFAULT_BLOCKS, DEFAULT_NBYTES // max(block_nbytes, 1)))
    tokens = min(blocks * larger, *(side.num_blocks * side.block_tokens for side in (src, dst)))
    return -(-tokens // src.block_tokens), -(-tokens // dst.block_tokens)


class _Verifying:
    """One verification under way: which bytes there are, and what they held."""

    def __init__(self, src: KVLayout, dst: KVLayout, ids: tuple[Int64Array, Int64Array], *, markers: bool) -> None:
        self.ids, self.markers = ids, markers
        self.src, self.dst = Contents(src), Contents(dst)
        self.layouts = (src, dst)
        self.matches: list[_Match] = []
        self.nbytes = 0
        for pair in match(src.geometry, dst.geometry):
            held = (pair.src.form, ids[0]), (pair.dst.form, ids[1])
            tokens = min(len(some) * extent(form.token) for form, some in held)
            shape = (tokens, len(pair.heads), pair.nbytes)
            self.matches.append(_Match(pair, self.nbytes, shape))
            self.nbytes += tokens * len(pair.heads) * pair.nbytes
        self.rounds = max(1, -(-(self.nbytes - 1).bit_length() // 8)) if markers else 1

    def run(self, executor: Any, plan: Any) -> Verification:
        """Move, compare, and put everything back."""
        _settle()
        saved = [self.dst.read(at) for at in self._whole_blocks()]
        given = [self.src.read(self._addresses(m, 0)) for m in self.matches]
        kept = [self.dst.read(self._addresses(m, 1)) for m in self.matches]
        found: list[list[Bytes]] = []
        try:
            for number in range(self.rounds):
                for k, one in enumerate(self.matches):
                    expected = self._expected(one, given[k], number)
                    if self.markers:
                        self.src.write(self._addresses(one, 0), expected)
                    # What is not written must not look as if it had arrived.
                    self.dst.write(self._addresses(one, 1), ~expected)
                _settle()
                _move(executor, plan)
                _settle()
                found.append([self.dst.read(self._addresses(one, 1)) for one in self.matches])
            for one, held in zip(self.matches, kept, strict=True):
                self.dst.write(self._addresses(one, 1), held)
            stray = self._stray(saved)
        finally:
            if self.markers:
                for one, held in zip(self.matches, given, strict=True):
                    self.src.write(self._addresses(one, 0), held)
            for at, held in zip(self._whole_blocks(), saved, strict=True):
                self.dst.write(at, held)
            _settle()
        return self._judge(given, found, stray)

    def _expected(self, one: _Match, given: Bytes, number: int) -> Bytes:
        """What the bytes of one pair hold in one round: their own number's byte of that place, or the source's."""
        if not self.markers:
            return given
        numbers = np.arange(one.first, one.first + given.size, dtype=np.int64).reshape(given.shape)
        return (numbers >> (8 * number)).astype(np.uint8)

    def _addresses(self, one: _Match, side: int) -> Int64Array:
        pair = one.pair
        component, dim = (pair.src, pair.src_dim) if side == 0 else (pair.dst, pair.dst_dim)
        tokens, _, nbytes = one.shape
        slots = extent(component.form.token)
        blocks, slot = np.divmod(np.arange(tokens, dtype=np.int64), slots)
        heads = np.arange(len(pair.heads), dtype=np.int64) + self._first_head(pair, component)
        return addresses_of(component, self.ids[side][blocks], slot, heads, np.arange(dim, dim + nbytes))

    @staticmethod
    def _first_head(pair: Pair, component: Component) -> int:
        """Of the heads moved, the first, counted from the component's own first."""
        return pair.heads.start - component.form.head_start if pair.src.form.headed and pair.dst.form.headed else 0

    def _whole_blocks(self) -> Iterator[Int64Array]:
        """Everything that the destination's blocks hold, moved or not."""
        for component in self.layouts[1].components:
            form = component.form
            slots, heads, content = (np.arange(extent(axis)) for axis in (form.token, form.head, form.dim))
            blocks = np.repeat(self.ids[1], len(slots))
            yield addresses_of(component, blocks, np.tile(slots, len(self.ids[1])), heads, content)

    def _stray(self, saved: Sequence[Bytes]) -> Row | None:
        """The first byte of the destination's blocks that was written and is none of the transfer's."""
        for component, at, held in zip(self.layouts[1].components, self._whole_blocks(), saved, strict=True):
            changed = np.argwhere(self.dst.read(at) != held)
            if len(changed):
                token, head, byte = changed[0].tolist()
                block, slot = divmod(token, extent(component.form.token))
                return _row(component, int(self.ids[1][block]), slot, head, byte)
        return None

    def _judge(self, given: Sequence[Bytes], found: Sequence[Sequence[Bytes]], stray: Row | None) -> Verification:
        wrong_nbytes, first, untouched, number = 0, None, False, 0
        for k, one in enumerate(self.matches):
            expected = [self._expected(one, given[k], r) for r in range(self.rounds)]
            differs = np.logical_or.reduce([found[r][k] != expected[r] for r in range(self.rounds)])
            wrong_nbytes += int(np.count_nonzero(differs))
            if first is None and differs.any():
                at = tuple(np.argwhere(differs)[0].tolist())
                first = (one, at)
                untouched = all(found[r][k][at] == ~expected[r][at] for r in range(self.rounds))
                number = sum(int(found[r][k][at]) << (8 * r) for r in range(self.rounds))
        row, held, words = stray, None, None
        if first is not None:
            row, source = self._coordinate(*first, 1), self._coordinate(*first, 0)
            words = f"{_words(row)} of the destination should hold {_words(source)} of the source"
            if untouched:
                words += ", and nothing arrived"
            elif self.markers and number < self.nbytes:
                held = self._coordinate(*self._numbered(number), 0)
                words += f", and holds {_words(held)}"
            else:
                words += ", and holds something else"
            words += f"; {wrong_nbytes:,} of {self.nbytes:,} bytes are wrong"
        elif stray is not None:
            words = f"{_words(stray)} of the destination was written, though nothing belongs there"
        ids = (tuple(self.ids[0].tolist()), tuple(self.ids[1].tolist()))
        return Verification(words is None, ids, self.nbytes, self.markers, self.rounds, wrong_nbytes, row, held, words)

    def _numbered(self, number: int) -> tuple[_Match, tuple[int, ...]]:
        one = next(one for one in reversed(self.matches) if one.first <= number)
        return one, tuple(int(k) for k in np.unravel_index(number - one.first, one.shape))

    def _coordinate(self, one: _Match, at: tuple[int, ...], side: Literal[0, 1]) -> Row:
        pair, (token, head, byte) = one.pair, at
        component, dim = (pair.src, pair.src_dim) if side == 0 else (pair.dst, pair.dst_dim)
        block, slot = divmod(token, extent(component.form.token))
        return _row(component, int(self.ids[side][block]), slot, head + self._first_head(pair, component), byte + dim)


def _row(component: Component, block: int, token: int, head: int, byte: int) -> Row:
    form = component.form
    return Row(
        component.layer,
        component.part,
        block,
        None if form.opaque else token,
        form.head_start + head if form.headed else None,
        byte,
    )


def _words(row: Row) -> str:
    return row_in_words(row, byte=True)


def _move(executor: Any, plan: Any) -> None:
    """One transfer, to its end: also where waiting for it fails, nothing is in flight when memory is put back."""
    transfer = executor.submit(plan)
    try:
        transfer.result()
    except BaseException:
        with contextlib.suppress(Exception):
            transfer.synchronize()
        raise


def _settle() -> None:
    """What torch has queued on GPUs is done before bytes are read, or moved by somebody else."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)

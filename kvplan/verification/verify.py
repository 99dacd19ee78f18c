"""Verification on live pools: a real transfer moves markers, which are compared with the layouts' addresses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from kvplan.base.integers import optional_integer
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.execute.executor import Executor
from kvplan.layout.components import INT64_MAX
from kvplan.layout.inverse import Row
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import row_in_words
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.plan.placement import own_block_ids
from kvplan.ranks.rank_pair import PairProgram
from kvplan.ranks.resharding import Resharding
from kvplan.verification.canary import Guard, Stray
from kvplan.verification.coverage import Coverage
from kvplan.verification.expected_bytes import Moved, stray_in_words, stray_row
from kvplan.verification.raw_bytes import Bytes, Contents
from kvplan.verification.verification import Verification
from kvplan.verification.writers import coverage_of

MAX_NBYTES = 64 << 20  # most bytes that one verification moves
DEFAULT_NBYTES, DEFAULT_BLOCKS = 4 << 20, 8
# Values of bytes that must not be written; the second value, for the last round, is no marker's last byte. There are
# two values because a byte copied from a place without markers is the same in all rounds: it differs from one of them.
POISON = (0x5A, 0xFF)


@overload
def verify(
    src: KVLayout,
    dst: KVLayout,
    *,
    executor: Any = None,
    blocks: int | tuple[Any, Any] | None = None,
    markers: bool = True,
    beside: Literal["poison", "watch", "ignore"] | None = None,
    reinterpret: bool = False,
) -> Verification: ...
@overload
def verify(src: Resharding | Sequence[CopyProgram | PairProgram]) -> Coverage: ...
def verify(
    src: KVLayout | Resharding | Sequence[CopyProgram | PairProgram],
    dst: KVLayout | None = None,
    *,
    executor: Any = None,
    blocks: int | tuple[Any, Any] | None = None,
    markers: bool = True,
    beside: Literal["poison", "watch", "ignore"] | None = None,
    reinterpret: bool = False,
) -> Verification | Coverage:
    """Move blocks with a real transfer, and compare every byte with :meth:`kvplan.KVLayout.address` of both layouts.

    It takes both layouts as given. It cannot know that a layout has K and V, or tokens and heads, the wrong way round.
    Of a set of programs, find instead the bytes of the destinations that no program writes, and those that two write:
    ``verify(programs)``. This plans the same tokens with every program, and moves nothing.

    The written blocks are saved before and restored after, also after an error; no other code may use them meanwhile.
    The first byte outside the transfer's rows that changes is reported. To see such changes, the other bytes of the
    blocks are overwritten before the transfer and restored after it. ``beside`` is for the destination's memory around
    the blocks. The CPU compares about ten million bytes per second.

    Args:
        src: layout to read; it is written and restored, unless ``markers`` is False. Or a set of programs: what
            :func:`kvplan.reshard` made, or a list of programs; then there is no other argument.
        dst: layout to write.
        executor: moves the plans; by default the host path, for two layouts in CPU memory.
        blocks: number of blocks of the side with the larger blocks; or ``(src_ids, dst_ids)``, such as an engine's free
            blocks. By default the first blocks: at most 8, and at most 4 MiB.
        markers: whether to write markers to the source blocks, and restore the blocks after. A marker encodes the
            byte's coordinate, so a byte in a wrong place shows its origin. Without markers, the source's own content is
            moved. Then rows of equal content, as in an empty pool, cannot be told apart.
        beside: treatment of the destination's memory outside its blocks (padding, other blocks). The nearest 32 MiB are
            watched byte by byte, and 128 MiB more by checksums of 4 KiB. ``"poison"``: no other code uses this memory.
            The nearest bytes are overwritten before and restored after, which also undoes a wrong transfer.
            ``"watch"``: the bytes are read before and after, and never written. ``"ignore"``: other code writes there
            meanwhile, so nothing is watched. The default is ``"watch"`` for blocks given by id, otherwise ``"poison"``.
        reinterpret: whether bytes of one number format may be read as another one; see :func:`kvplan.compile`.

    Returns:
        A :class:`Verification`; of a set of programs, a :class:`kvplan.Coverage`.

    Raises:
        IncompatibleLayoutsError: the layouts do not compile.
        BlockIndexError: a block does not exist, a source block is named twice, or the sides cover different tokens.
        OverlapError: a destination block is named twice.
        LayoutError: addresses are not this process's, memory is read-only, or more than 64 MiB would move.
        KVPlanError: layouts are on a GPU and no executor is given, or ``beside`` is unknown; or the executor raises it.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("kv block token head dim", np.zeros((2, 8, 16, 2, 64), np.int8))
    >>> pool = kvplan.allocate("block kv head token dim", like=gpu, num_blocks=4, block_tokens=32)
    >>> found = kvplan.verify(gpu, pool, markers=True)
    >>> found.ok, found.nbytes, found.wrong
    (True, 32768, None)
    >>> print(found)
    32,768 bytes arrived where they belong

    Two ranks that were described without ``head_start`` both write the first heads:

    >>> pools = [np.zeros((4, 2, heads, 16, 64), np.int8) for heads in (2, 2, 4)]
    >>> *ranks, pool = [kvplan.KVLayout.from_tensors("block kv head token dim", each) for each in pools]
    >>> found = kvplan.verify([kvplan.compile(rank, pool) for rank in ranks])
    >>> found.ok, [each.heads for each in found.unwritten], [(each.heads, each.programs) for each in found.twice]
    (False, [(2, 3)], [((0, 1), ('0', '1'))])
    """
    if not isinstance(src, KVLayout):
        if isinstance(dst, KVLayout):
            raise LayoutError(
                f"src is a {type(src).__name__}; give the layout to read, as KVLayout.from_tensors makes it"
            )
        if (dst, executor, blocks, markers, beside, reinterpret) != (None, None, None, True, None, False):
            raise KVPlanError("verify of a set of programs moves nothing; it takes no other argument")
        return coverage_of(src)
    if not isinstance(dst, KVLayout):
        raise LayoutError(f"dst is a {type(dst).__name__}; give the layout to write")
    if beside not in (None, "poison", "watch", "ignore"):
        raise KVPlanError(f"beside is {beside!r}; it is 'poison', 'watch' or 'ignore'")
    program = compile_quietly(src, dst, reinterpret=reinterpret)
    for layout, written in ((src, markers), (dst, True)):
        if written and not layout.writable:
            raise LayoutError(
                f"{layout!r} holds a read-only array; verification writes to it and restores it, so give a writable one"
            )
    ids = _chosen(src, dst, blocks)
    if beside is None:
        beside = "watch" if _by_id(blocks) else "poison"
    plan = program.plan(*ids)
    if plan.nbytes > MAX_NBYTES:
        raise LayoutError(f"the blocks hold {plan.nbytes:,} bytes; a verification moves at most {MAX_NBYTES:,}")
    if len(set(ids[0].tolist())) != len(ids[0]):
        raise BlockIndexError(
            "src_blocks name a block more than once; give each block once, since it holds one set of markers"
        )
    own = executor is None
    if own and (src.device, dst.device) != ("cpu", "cpu"):
        raise KVPlanError(
            f"verification from {src.device} to {dst.device} takes an executor of that GPU: verify(..., executor=...)"
        )
    mover = Executor(device="cpu") if own else executor
    try:
        found = _Verifying(Moved(src, dst, ids), markers=markers, beside=beside).run(mover, plan)
    finally:
        if own:
            mover.close()
    return replace(found, unwritten=program.unwritten)


def _chosen(src: KVLayout, dst: KVLayout, blocks: Any) -> tuple[Int64Array, Int64Array]:
    """Return the block ids of both sides."""
    if _by_id(blocks):
        return own_block_ids(blocks[0], "src_blocks"), own_block_ids(blocks[1], "dst_blocks")
    counts = block_counts(src, dst, number_of_blocks(blocks))
    return np.arange(counts[0], dtype=np.int64), np.arange(counts[1], dtype=np.int64)


def _by_id(blocks: Any) -> bool:
    return isinstance(blocks, tuple | list) and len(blocks) == 2


def number_of_blocks(blocks: Any) -> int | None:
    """Return ``blocks`` if it is a number of blocks or None; otherwise raise BlockIndexError."""
    right = "give a number of at least 1, or (src_ids, dst_ids)"
    return optional_integer("blocks", blocks, least=1, right=right, error=BlockIndexError)


def block_counts(src: KVLayout, dst: KVLayout, blocks: int | None) -> tuple[int, int]:
    """Return the number of blocks of each side that cover ``blocks`` larger blocks, or the whole smaller layout."""
    larger = max(src.block_tokens, dst.block_tokens)
    if blocks is None:
        block_nbytes = min(src.block_nbytes // src.block_tokens, dst.block_nbytes // dst.block_tokens) * larger
        blocks = max(1, min(DEFAULT_BLOCKS, DEFAULT_NBYTES // max(block_nbytes, 1)))
    tokens = min(blocks * larger, *(side.num_blocks * side.block_tokens for side in (src, dst)))
    return -(-tokens // src.block_tokens), -(-tokens // dst.block_tokens)


class _Verifying:
    """A verification in progress: the bytes to move, and the content of all written bytes before it."""

    def __init__(self, moved: Moved, *, markers: bool, beside: str) -> None:
        self.moved, self.markers = moved, markers
        src, dst = moved.layouts
        self.src, self.dst = Contents(src), Contents(dst)
        self.partial = moved.nbytes < len(moved.ids[1]) * dst.block_nbytes
        self.rounds = 2
        while markers and moved.nbytes > POISON[1] * 256 ** (self.rounds - 1):
            self.rounds += 1
        _settle()
        self.saved = [self.dst.read(at) for _, at in moved.whole_blocks()]
        self.given = [self.src.read(moved.addresses(one, 0)) for one in moved.matches]
        self.guard = None
        if beside != "ignore":
            self.guard = Guard(self.dst, dst.regions, moved.taken(), poison=beside == "poison")

    def run(self, executor: Any, plan: Any) -> Verification:
        """Make all transfers, compare the bytes, restore them, and return the findings."""
        found: list[list[Bytes]] = []
        strays: list[Stray] = []
        stray_nbytes = 0
        try:
            for number in range(self.rounds):
                self._prepare(number)
                _settle()
                _move(executor, plan)
                _settle()
                found.append([self.dst.read(self.moved.addresses(one, 1)) for one in self.moved.matches])
                seen = [self._beside_in_blocks(number), self._in_source(number)]
                seen += [self.guard.check(sums=number == self.rounds - 1)] if self.guard is not None else []
                strays += [stray for stray, _ in seen if stray is not None]
                stray_nbytes = max(stray_nbytes, sum(nbytes for _, nbytes in seen))
        finally:
            self._put_back()
        stray = min(strays, key=lambda stray: stray.address, default=None)
        return self._judge(found, stray, stray_nbytes)

    def _prepare(self, number: int) -> None:
        poison = self._poison(number)
        if self.guard is not None:
            self.guard.poison(poison)
        for _, at in self.moved.whole_blocks() if self.partial else ():
            self.dst.write(at, np.full(at.shape, poison, np.uint8))
        for k, one in enumerate(self.moved.matches):
            expected = self._expected(k, number)
            if self.markers:
                self.src.write(self.moved.addresses(one, 0), expected)
            # Bytes that the transfer misses must not look as if they had arrived.
            self.dst.write(self.moved.addresses(one, 1), ~expected)

    def _poison(self, number: int) -> int:
        return POISON[number == self.rounds - 1]

    def _expected(self, k: int, number: int) -> Bytes:
        """Return one pair's expected bytes in a round: one byte of each byte's own number, or the source's content."""
        given = self.given[k]
        if not self.markers:
            return given
        first = self.moved.matches[k].first
        numbers = np.arange(first, first + given.size, dtype="<u4")  # MAX_NBYTES numbers have four bytes
        return numbers.view(np.uint8)[number::4].reshape(given.shape)

    def _beside_in_blocks(self, number: int) -> tuple[Stray | None, int]:
        """Find written bytes of the destination's blocks that the transfer does not move; overwrite the moved bytes."""
        if not self.partial:
            return None, 0
        poison = self._poison(number)
        for one in self.moved.matches:
            self.dst.write(self.moved.addresses(one, 1), np.full(one.shape, poison, np.uint8))
        return _changed((at, self.dst.read(at), np.uint8(poison)) for _, at in self.moved.whole_blocks())

    def _in_source(self, number: int) -> tuple[Stray | None, int]:
        """Find written bytes of the source's rows, and repair them before the next round moves them."""
        strays: list[Stray] = []
        total = 0
        for k, one in enumerate(self.moved.matches):
            at, expected = self.moved.addresses(one, 0), self._expected(k, number)
            stray, nbytes = _changed([(at, self.src.read(at), expected)])
            if stray is not None:
                self.src.write(at, expected)
                strays, total = [*strays, stray], total + nbytes
        return min(strays, key=lambda stray: stray.address, default=None), total

    def _put_back(self) -> None:
        if self.guard is not None:
            self.guard.put_back()
        for one, held in zip(self.moved.matches, self.given, strict=True):
            at = self.moved.addresses(one, 0)
            # Also without markers: the code that raised an error may have written it.
            if self.markers or not np.array_equal(self.src.read(at), held):
                self.src.write(at, held)
        for (_, at), held in zip(self.moved.whole_blocks(), self.saved, strict=True):
            self.dst.write(at, held)
        _settle()

    def _judge(self, found: Sequence[Sequence[Bytes]], stray: Stray | None, stray_nbytes: int) -> Verification:
        moved, wrong_nbytes, first, untouched, number = self.moved, 0, None, False, 0
        for k, one in enumerate(moved.matches):
            expected = [self._expected(k, r) for r in range(self.rounds)]
            differs = np.logical_or.reduce([found[r][k] != expected[r] for r in range(self.rounds)])
            wrong_nbytes += int(np.count_nonzero(differs))
            if first is None and differs.any():
                at = tuple(np.argwhere(differs)[0].tolist())
                first = (one, at)
                untouched = all(found[r][k][at] == ~expected[r][at] for r in range(self.rounds))
                number = sum(int(found[r][k][at]) << (8 * r) for r in range(self.rounds))
        row, held, said = None, None, []
        if first is not None:
            row, source = moved.coordinate(*first, 1), moved.coordinate(*first, 0)
            words = f"{_words(row)} of the destination should hold {_words(source)} of the source"
            if untouched:
                words += ", and nothing arrived"
            elif self.markers and number < moved.nbytes:
                held = moved.numbered(number)
                words += f", and holds {_words(held)}"
            else:
                words += ", and holds something else"
            said.append(f"{words}; {wrong_nbytes:,} of {moved.nbytes:,} bytes are wrong")
        if stray is not None:
            row = row or stray_row(stray, moved.layouts)
            said.append(stray_in_words(stray, stray_nbytes, moved.layouts))
        ids = (tuple(moved.ids[0].tolist()), tuple(moved.ids[1].tolist()))
        return Verification(
            not said, ids, moved.nbytes, self.markers, self.rounds, wrong_nbytes, row, held, "; ".join(said) or None,
            stray, stray_nbytes, 0 if self.guard is None else self.guard.nbytes,
        )  # fmt: skip


def _changed(several: Iterable[tuple[Int64Array, Bytes, Any]]) -> tuple[Stray | None, int]:
    """Return the first wrong byte and the number of wrong bytes, from (addresses, actual bytes, expected bytes)."""
    strays, total = [], 0
    for at, held, known in several:
        differs = held != known
        if differs.any():
            total += int(np.count_nonzero(differs))
            first = np.unravel_index(np.argmin(np.where(differs, at, INT64_MAX)), at.shape)
            strays.append(Stray(int(at[first]), 1, int(np.broadcast_to(known, at.shape)[first]), int(held[first])))
    return min(strays, key=lambda stray: stray.address, default=None), total


def _words(row: Row) -> str:
    return row_in_words(row, byte=True)


def _move(executor: Any, plan: Any) -> None:
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

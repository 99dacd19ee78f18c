"""Recipes: one half of a packed transfer as bytes, for the process that owns that side. It checks them before use.

A recipe has a header, a part that all transfers of a program share, and the addresses of the units:

| table | row |
| --- | --- |
| header | magic, version, side; numbers of sections, runs and columns; bytes of the whole recipe |
| sections | column, runs, bytes of a unit; step, residue and period of the units' addresses |
| runs | offset at the unit, offset in the chunk, bytes; two loops of (count, stride at the unit, stride in the chunk) |
| columns | units, first address, step, bytes of an index or 0, the column that this one repeats |

Numbers are little-endian, int64 in all tables. Behind the columns come their indices, as unsigned integers of 1, 2, 4
or 8 bytes, each column padded to 8 bytes: unit ``k`` is at ``first address + step * index[k]``. A column without
indices repeats an earlier column at another first address.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.limits import LIMITS
from kvplan.errors import KVPlanError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.packing.chunk_half import Half, HalfSection
from kvplan.plan.packing.pack_checks import Column, Extents, Offered, check_disjoint, check_within, extents_of
from kvplan.plan.packing.pack_order import GRAIN, REACH, SIDES, Place, half_group
from kvplan.program.program import Run, RunGroup

MAGIC, VERSION = b"kvpr", 1
HEADER = struct.Struct("<4sHHIIIIQ")
SECTION, RUN, COLUMN = 6, 9, 5  # words of a row
WIDTHS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
ADDRESSES = 1 << 62  # more than any address, and so small that a sum of two does not overflow
KEPT = 64 << 10  # bytes: shared parts up to this size are kept, so that a GPU uploads their tables once


class _Checked(NamedTuple):
    """A section of a shared part, checked.

    Attributes:
        column: number of its units' column.
        group: its run group.
        unit_nbytes: bytes of a unit in a chunk.
        place: what its units' addresses have in common.
        extents: the bytes of a unit, at its own side.
    """

    column: int
    group: RunGroup
    unit_nbytes: int
    place: Place
    extents: Extents


# ---- writing -----------------------------------------------------------------------------------------------------


def recipe_of(half: Half) -> bytes:
    """Return the recipe of a half; see :meth:`kvplan.plan.packing.packing.Packing.recipe`.

    Raises:
        KVPlanError: a unit has too many runs.
    """
    numbers: dict[int, int] = {}
    columns: list[tuple[Int64Array, Place]] = []
    sections: list[tuple[int, ...]] = []
    tables: list[Int64Array] = []
    for group, unit_nbytes, addresses, place in half.sections:
        number = numbers.setdefault(id(addresses), len(columns))
        if number == len(columns):
            columns.append((addresses, place))
        table = _rows_of(group, half.side)
        sections.append((number, len(table), unit_nbytes, *place))
        tables.append(table)
    rows = np.concatenate([np.empty((0, RUN), np.int64), *tables])
    if len(rows) > LIMITS.recipe_runs or sum(s.group.packed.shape[1] for s in half.sections) > LIMITS.recipe_copies:
        raise KVPlanError(
            f"a unit of {half!r} takes {len(rows):,} runs; a recipe has at most {LIMITS.recipe_runs:,}, and "
            f"{LIMITS.recipe_copies:,} copies; give smaller blocks, or layouts whose orders differ less"
        )
    heads, payloads = _columns(columns)
    body = b"".join(
        [
            np.array(sections, dtype="<i8").tobytes(),
            rows.astype("<i8", copy=False).tobytes(),
            np.array(heads, dtype="<i8").tobytes(),
            *payloads,
        ]
    )
    side = SIDES.index(half.side)
    return HEADER.pack(MAGIC, VERSION, side, len(sections), len(rows), len(columns), 0, HEADER.size + len(body)) + body


def _rows_of(group: RunGroup, side: str) -> Int64Array:
    """Return the run table of a group with the unit's side first."""
    return group.table if side == "src" else group.table[:, [1, 0, 2, 3, 5, 4, 6, 8, 7]]


def _columns(columns: Sequence[tuple[Int64Array, Place]]) -> tuple[list[tuple[int, ...]], list[bytes]]:
    heads: list[tuple[int, ...]] = []
    payloads: list[bytes] = []
    for number, (addresses, place) in enumerate(columns):
        twin = _twin(columns[:number], addresses, place)
        if twin is not None:
            heads.append((addresses.size, int(addresses[0]), heads[twin][2], 0, twin))
            continue
        first = int(addresses.min()) if addresses.size else 0
        index = (addresses - first) // place.step
        largest = int(index.max()) if addresses.size else 0
        width = next(width for width in WIDTHS if largest < 1 << 8 * width)
        data = index.astype(WIDTHS[width]).tobytes()
        heads.append((addresses.size, first, place.step, width, number))
        payloads.append(data + bytes(-len(data) % 8))
    return heads, payloads


def _twin(columns: Sequence[tuple[Int64Array, Place]], addresses: Int64Array, place: Place) -> int | None:
    """Return the first column whose units all lie equally far from those of this one."""
    for number, (other, its) in enumerate(columns):
        if other.size == addresses.size > 0 and its.step % place.step == 0:
            far = int(addresses[0] - other[0])
            if int(addresses[-1] - other[-1]) == far and bool((addresses - other == far).all()):
                return number
    return None


# ---- reading -----------------------------------------------------------------------------------------------------


def half_of(recipe: bytes, offered: Offered | Mapping[str, KVLayout] | Sequence[KVLayout], side: str) -> Half:
    """Make a half from the recipe of another process, after every check: it can move nothing but offered memory.

    Args:
        recipe: bytes from :meth:`kvplan.plan.packing.packing.Packing.recipe`.
        offered: the layouts that the other process may use; an :class:`Offered` is quicker if it is used again.
        side: ``"src"`` for a recipe that gathers from these layouts, ``"dst"`` for one that scatters to them.

    Raises:
        TransferError: the recipe is malformed or too large; it reaches outside the layouts; its gather leaves bytes of
            a chunk unwritten; or its scatter would write a byte twice, or write read-only memory.

    >>> import kvplan
    >>> from kvplan.plan.packing.packing import packing_of
    >>> mine = kvplan.KVLayout.from_tensors("block dim", np.zeros((8, 64), np.int8))
    >>> theirs = kvplan.KVLayout.from_spec({"notation": "block dim", "dtype": "int8", "address": 4096,
    ...                                     "sizes": {"block": 8, "dim": 64}})
    >>> recipe = packing_of(kvplan.compile(mine, theirs).plan([1, 2], [5, 3])).recipe("src")
    >>> half = half_of(recipe, [mine], "src")
    >>> half.units, half.nbytes, len(recipe)
    (2, 128, 200)
    """
    if side not in SIDES:
        raise KVPlanError(f"side is {side!r}; give 'src', which gathers, or 'dst', which scatters")
    sections, columns = _read(bytes(recipe), side)
    if not isinstance(offered, Offered):
        offered = Offered(list(offered.values()) if isinstance(offered, Mapping) else offered)
    held: dict[int, Extents] = {}
    for one in sections:
        known = held.get(one.column)
        held[one.column] = one.extents if known is None else known.plus(one.extents)
    touched: set[int] = set()
    for number, extents in held.items():
        touched |= check_within(columns[number].addresses, extents, offered, writing=side == "dst")
    if side == "dst":
        check_disjoint([(columns[number], extents) for number, extents in held.items()])
    made = [HalfSection(one.group, one.unit_nbytes, columns[one.column].addresses, one.place) for one in sections]
    return Half(side, made, *offered.of(touched))


def _wrong(text: str) -> TransferError:
    return TransferError(f"a recipe from a peer {text}")


def _read(recipe: bytes, side: str) -> tuple[tuple[_Checked, ...], list[Column]]:
    if not HEADER.size <= len(recipe) <= LIMITS.recipe_nbytes:
        raise _wrong(f"has {len(recipe):,} bytes; it has {HEADER.size} to {LIMITS.recipe_nbytes:,}")
    magic, version, number, sections, runs, count, _, nbytes = HEADER.unpack_from(recipe)
    if magic != MAGIC or version != VERSION:
        raise _wrong(f"begins with {recipe[:6]!r}; this is {MAGIC!r} of version {VERSION}")
    if number >= len(SIDES) or SIDES[number] != side:
        raise _wrong(f"is for side {number}; asked for is {side!r}")
    if nbytes != len(recipe):
        raise _wrong(f"has {len(recipe):,} bytes and says {nbytes:,}")
    if sections > LIMITS.recipe_sections or runs > LIMITS.recipe_runs or count > sections:
        raise _wrong(f"has {sections:,} sections, {runs:,} runs and {count:,} columns of addresses; that is too many")
    shared = HEADER.size + 8 * (SECTION * sections + RUN * runs)
    begin = shared + 8 * COLUMN * count
    if begin > len(recipe):
        raise _wrong("is cut off")
    part = recipe[HEADER.size : shared]
    checked = (_kept if len(part) <= KEPT else _shared_part)(part, sections, side)
    heads = np.frombuffer(recipe, dtype="<i8", count=COLUMN * count, offset=shared).reshape(-1, COLUMN).tolist()
    return checked, _read_columns(recipe, heads, begin, checked)


def _shared_part(part: bytes, count: int, side: str) -> tuple[_Checked, ...]:
    """Check the sections and runs of a recipe, and make their run groups."""
    words = np.frombuffer(part, dtype="<i8").astype(np.int64, copy=False)
    heads, rows = words[: SECTION * count].reshape(-1, SECTION), words[SECTION * count :].reshape(-1, RUN)
    for column, runs, unit_nbytes, step, residue, period in heads.tolist():
        numbers = 0 <= column < count and 1 <= runs <= len(rows) and 1 <= unit_nbytes < REACH
        if not (numbers and 1 <= step <= REACH and 0 <= residue < step and 1 <= period <= REACH):
            raise _wrong(f"has a section {(column, runs, unit_nbytes, step, residue, period)} that cannot be")
    if int(heads[:, 1].sum()) != len(rows):
        raise _wrong(f"has {len(rows)} runs, and its sections {int(heads[:, 1].sum())}")
    _check_rows(rows)
    made, at, grain = [], 0, GRAIN
    for column, runs, unit_nbytes, step, residue, period in heads.tolist():
        place = Place(step, residue, period)
        group = half_group(side, _runs(rows[at : at + runs]), place, unit_nbytes)
        at += runs
        if grain % min(group.alignment, GRAIN):
            raise _wrong("has sections whose units would lose their alignment in a chunk")
        grain = min(grain, unit_nbytes & -unit_nbytes)
        made.append(_Checked(column, group, unit_nbytes, place, _covering(group, unit_nbytes, side)))
    return tuple(made)


_kept = lru_cache(maxsize=128)(_shared_part)


def _check_rows(rows: Int64Array) -> None:
    """Check that no number of the runs is out of range, so that no sum of them overflows."""
    counts, strides = rows[:, [3, 6]], rows[:, [[4, 5], [7, 8]]]
    fine = (rows[:, 0] > -REACH).all() and (rows[:, 1] >= 0).all() and (rows[:, 2] >= 1).all()
    small = (rows[:, :3] < REACH).all() and (counts >= 1).all() and (counts <= LIMITS.recipe_copies).all()
    if not (fine and small and (strides > -REACH).all() and (np.abs(strides) <= REACH // counts[:, :, None]).all()):
        raise _wrong("has a run whose numbers are out of range")
    if int(counts.prod(axis=1).sum()) > LIMITS.recipe_copies:
        raise _wrong(f"makes over {LIMITS.recipe_copies:,} copies of a unit")


def _runs(rows: Int64Array) -> list[Run]:
    made = []
    for cache, chunk, nbytes, *loops in rows.tolist():
        both = (loops[0], loops[1], loops[2]), (loops[3], loops[4], loops[5])
        made.append(Run(cache, chunk, nbytes, tuple([loop for loop in both if loop[0] > 1])))
    return made


def _covering(group: RunGroup, unit_nbytes: int, side: str) -> Extents:
    """Check that a unit's copies cover its bytes in the chunk, each once; return its extents on its own side."""
    src, dst, size = group.offsets
    cache, chunk = (src, dst) if side == "src" else (dst, src)
    order = np.argsort(chunk)
    start, length = chunk[order], size[order]
    ends = np.cumsum(length)
    if int(ends[-1]) != unit_nbytes or bool((start != ends - length).any()):
        raise _wrong(f"leaves bytes of a unit's {unit_nbytes:,} in the chunk out, or names them twice")
    return extents_of(cache, size)


def _read_columns(
    recipe: bytes, heads: Sequence[Sequence[int]], begin: int, checked: Sequence[_Checked]
) -> list[Column]:  # fmt: skip
    """Read the addresses of the units, and check that they are as the sections say."""
    at, columns = begin, list[Column]()
    periods = dict[int, int]()
    for one in checked:
        if one.column >= len(heads):
            raise _wrong(f"has no column {one.column}")
        periods.setdefault(one.column, one.place.period)
    if len(periods) != len(heads):
        raise _wrong("has a column of addresses without a section")
    for number, (count, first, given, width, root) in enumerate(heads):
        step = given
        if not (0 <= count <= LIMITS.recipe_units and 0 <= first < ADDRESSES and 1 <= step <= REACH):
            raise _wrong(f"has a column of {count:,} units, from {first:#x} in steps of {step:,}")
        if width:
            nbytes = count * width
            if width not in WIDTHS or root != number or at + nbytes > len(recipe):
                raise _wrong("is cut off")
            index = np.frombuffer(recipe, dtype=WIDTHS[width], count=count, offset=at)
            at += nbytes + -nbytes % 8
            if count and int(index.max()) > (ADDRESSES - first) // step:
                raise _wrong("has a unit beyond all addresses")
            index = index.astype(np.int64)
            addresses = index * step
            addresses += first
        else:
            if not 0 <= root < number or columns[root].root != root or columns[root].addresses.size != count:
                raise _wrong(f"repeats column {root}, which is not there")
            index, step, addresses = columns[root].indices, columns[root].step, columns[root].addresses
            if count:
                far = first - int(addresses[0])
                if int(addresses.min()) + far < 0 or int(addresses.max()) + far > ADDRESSES:
                    raise _wrong("has a unit beyond all addresses")
                addresses = addresses + far
        columns.append(Column(addresses, index, step, root, periods[number]))
    if at != len(recipe):
        raise _wrong(f"has {len(recipe) - at} bytes too many")
    for one in checked:
        column = columns[one.column]
        if column.addresses.size and (
            column.step % one.place.step or int(column.addresses[0]) % one.place.step != one.place.residue
        ):
            raise _wrong("has units that are not as aligned as it says")
    return columns

"""Recipes: one half of a packed transfer as bytes, for the process that owns that side. It checks them before use.

A recipe has a header, a part that all transfers of a program share, and the addresses of the units:

| table | row |
| --- | --- |
| header | magic, version, side; numbers of sections, runs and columns; bytes of the whole recipe |
| sections | column, runs, bytes of a unit; step and residue of the units' addresses |
| runs | offset at the unit, offset in the chunk, bytes; two loops of (count, stride at the unit, stride in the chunk) |
| columns | units, first address, step, bytes of an index or 0, the column that this one repeats |

Numbers are little-endian, int64 in all tables. Behind the columns come their indices, as unsigned integers of 1, 2, 4
or 8 bytes, each column padded to 8 bytes: unit ``k`` is at ``first address + step * index[k]``. A column without
indices repeats an earlier column at another first address.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.base.limits import LIMITS
from kvplan.errors import KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.packing.chunk_half import Half, HalfSection
from kvplan.plan.packing.pack_checks import Column, Extents, Offered, check_within, joined
from kvplan.plan.packing.pack_order import REACH, SIDES, Place
from kvplan.plan.packing.recipe_tables import RUN, SECTION, CheckedSection, checked_sections, wrong
from kvplan.program.program import RunGroup

MAGIC, VERSION = b"kvpr", 2
HEADER = struct.Struct("<4sHHIIIIQ")
COLUMN = 5  # words of a row
WIDTHS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
Buffer = bytes | memoryview
SAMPLE = 64  # addresses whose common step is tried for all
ADDRESSES = 1 << 62  # more than any address, and so small that a sum of two does not overflow
_turned: WeakKeyDictionary[RunGroup, Int64Array] = WeakKeyDictionary()  # run tables of the side "dst"


# ---- writing -----------------------------------------------------------------------------------------------------


def recipe_of(half: Half) -> bytes:
    """Return the recipe of a half; see :meth:`kvplan.plan.packing.packing.Packing.recipe`.

    Raises:
        KVPlanError: it has more units or runs than a recipe may have.
    """
    return b"".join(recipe_pieces(half))


def recipe_pieces(half: Half) -> list[Buffer]:
    """Return the recipe of a half in pieces, one behind the other. New memory for a copy takes longer than all else.

    Raises:
        KVPlanError: it has more units or runs than a recipe may have.
    """
    numbers: dict[int, int] = {}
    columns: list[tuple[Int64Array, Place]] = []
    sections: list[tuple[int, ...]] = []
    tables: list[Int64Array] = []
    for group, unit_nbytes, addresses, place in half.sections:
        number = numbers.setdefault(id(addresses), len(columns))
        if number == len(columns):
            columns.append((addresses, place))
        table = _table_of(group, half.side)
        sections.append((number, len(table), unit_nbytes, *place))
        tables.append(table)
    rows = np.concatenate([np.empty((0, RUN), np.int64), *tables])
    copies = sum(section.group.packed.shape[1] for section in half.sections)
    units = sum(addresses.size for addresses, _ in columns)
    for count, most, noun in (
        (len(sections), LIMITS.recipe_sections, "sizes of units"),
        (len(rows), LIMITS.recipe_runs, "runs of a unit"),
        (copies, LIMITS.recipe_copies, "copies of a unit"),
        (units, LIMITS.recipe_units, "addresses of units"),
        (half.nbytes, LIMITS.recipe_moved, "bytes to move"),
    ):
        if count > most:
            raise KVPlanError(
                f"the plan takes {count:,} {noun}, and a recipe has at most {most:,}; plan fewer blocks at once, or "
                "give layouts whose orders differ less"
            )
    heads, payloads = _columns(columns)
    body: list[Buffer] = [
        np.array(sections, dtype="<i8").tobytes(),
        rows.astype("<i8", copy=False).tobytes(),
        np.array(heads, dtype="<i8").tobytes(),
        *payloads,
    ]
    nbytes = HEADER.size + sum([len(part) for part in body])
    head = HEADER.pack(MAGIC, VERSION, SIDES.index(half.side), len(sections), len(rows), len(columns), 0, nbytes)
    return [head, *body]


def _table_of(group: RunGroup, side: str) -> Int64Array:
    """Return the run table of a group with the unit's side first; all transfers of a program share it."""
    if side == "src":
        return group.table
    known = _turned.get(group)
    if known is None:
        known = _turned[group] = np.ascontiguousarray(group.table[:, [1, 0, 2, 3, 5, 4, 6, 8, 7]])
    return known


def _columns(columns: Sequence[tuple[Int64Array, Place]]) -> tuple[list[tuple[int, ...]], list[Buffer]]:
    heads: list[tuple[int, ...]] = []
    payloads: list[Buffer] = []
    for number, (addresses, place) in enumerate(columns):
        twin = _twin(columns[:number], addresses, place)
        if twin is not None:
            heads.append((addresses.size, int(addresses[0]), heads[twin][2], 0, twin))
            continue
        first, step, indices = _indices_of(addresses, place.step)
        heads.append((addresses.size, first, step, indices.itemsize, number))
        payloads += [memoryview(indices).cast("B") if indices.size else b"", bytes(-indices.nbytes % 8)]
    return heads, payloads


def _indices_of(addresses: Int64Array, step: int) -> tuple[int, int, np.ndarray[Any, Any]]:
    """Return the lowest address, a step, and the distances of all from the lowest in steps.

    The step is the largest that the first few addresses have in common, if all have it.
    """
    if not addresses.size:
        return 0, step, np.empty(0, WIDTHS[1])
    from kvplan.plan.packing import column_loops

    pieces = column_loops.pieces(addresses.size)
    bounds = [column_loops.bounds_of(addresses[some]) for some in pieces]
    low, high = min([low for low, _ in bounds]), max([high for _, high in bounds])
    for wider in (column_loops.step_of(addresses[:SAMPLE], low, step), step):
        most = (high - low) // wider
        width = next(width for width in WIDTHS if most < 1 << 8 * width)
        indices = np.empty(addresses.size, WIDTHS[width])
        if all(column_loops.divide(addresses[some], low, wider, most, indices[some]) for some in pieces):
            return low, wider, indices
    raise KVPlanError(f"the addresses of units do not differ by multiples of {step} bytes")


def _twin(columns: Sequence[tuple[Int64Array, Place]], addresses: Int64Array, place: Place) -> int | None:
    """Return the first column whose units all lie equally far from those of this one."""
    for number, (other, its) in enumerate(columns):
        if other.size == addresses.size > 0 and its.step % place.step == 0:
            far = int(addresses[0] - other[0])
            if int(addresses[-1] - other[-1]) == far and bool((addresses - other == far).all()):
                return number
    return None


# ---- reading -----------------------------------------------------------------------------------------------------


def half_of(recipe: Buffer, offered: Offered | Mapping[str, KVLayout] | Sequence[KVLayout], side: str) -> Half:
    """Make a half from the recipe of another process, after every check: it can move nothing but offered memory.

    Args:
        recipe: bytes from :meth:`kvplan.plan.packing.packing.Packing.recipe`.
        offered: the layouts that the other process may use; an :class:`Offered` is quicker if it is used again.
        side: ``"src"`` for a recipe that gathers from these layouts, ``"dst"`` for one that scatters to them.

    Raises:
        TransferError: the recipe is malformed or too large; it reaches outside the layouts; its gather leaves bytes of
            a chunk unwritten; or its scatter would write read-only memory.

    >>> import kvplan
    >>> from kvplan.plan.packing.packing import packing_of
    >>> mine = kvplan.KVLayout.from_tensors("block dim", np.zeros((8, 64), np.int8))
    >>> theirs = kvplan.KVLayout.from_spec({"notation": "block dim", "dtype": "int8", "address": 4096,
    ...                                     "sizes": {"block": 8, "dim": 64}})
    >>> recipe = packing_of(kvplan.compile(mine, theirs).plan([1, 2], [5, 3])).recipe("src")
    >>> half = half_of(recipe, [mine], "src")
    >>> half.units, half.nbytes, len(recipe)
    (2, 128, 192)
    """
    if side not in SIDES:
        raise KVPlanError(f"side is {side!r}; give 'src', which gathers, or 'dst', which scatters")
    sections, columns = _read(memoryview(recipe), side)
    if not isinstance(offered, Offered):
        offered = Offered(list(offered.values()) if isinstance(offered, Mapping) else offered)
    nbytes = sum(columns[one.column].addresses.size * one.unit_nbytes for one in sections)
    if nbytes > LIMITS.recipe_moved:
        raise wrong(f"moves {nbytes:,} bytes; it moves at most {LIMITS.recipe_moved:,}")
    several: dict[int, list[Extents]] = {}
    for one in sections:
        several.setdefault(one.column, []).append(one.extents)
    held = [(columns[number], joined(some)) for number, some in several.items()]
    touched: set[int] = set()
    for column, extents in held:
        touched |= check_within(column, extents, offered, writing=side == "dst")
    made = [HalfSection(one.group, one.unit_nbytes, columns[one.column].addresses, one.place) for one in sections]
    return Half(side, made, *offered.of(touched))


def _read(recipe: memoryview, side: str) -> tuple[tuple[CheckedSection, ...], list[Column]]:
    if not HEADER.size <= len(recipe) <= LIMITS.recipe_nbytes:
        raise wrong(f"has {len(recipe):,} bytes; it has {HEADER.size} to {LIMITS.recipe_nbytes:,}")
    magic, version, number, sections, runs, count, _, nbytes = HEADER.unpack_from(recipe)
    if magic != MAGIC or version != VERSION:
        raise wrong(f"begins with {bytes(recipe[:6])!r}; this is {MAGIC!r} of version {VERSION}")
    if number >= len(SIDES) or SIDES[number] != side:
        raise wrong(f"is for side {number}; asked for is {side!r}")
    if nbytes != len(recipe):
        raise wrong(f"has {len(recipe):,} bytes and says {nbytes:,}")
    if sections > LIMITS.recipe_sections or runs > LIMITS.recipe_runs or count > sections:
        raise wrong(f"has {sections:,} sections, {runs:,} runs and {count:,} columns of addresses; that is too many")
    shared = HEADER.size + 8 * (SECTION * sections + RUN * runs)
    begin = shared + 8 * COLUMN * count
    if begin > len(recipe):
        raise wrong("is cut off")
    part = bytes(recipe[HEADER.size : shared])
    checked = checked_sections(part, sections, side)
    heads = np.frombuffer(recipe, dtype="<i8", count=COLUMN * count, offset=shared).reshape(-1, COLUMN).tolist()
    return checked, _read_columns(recipe, heads, begin, checked)


def _read_columns(
    recipe: memoryview, heads: Sequence[Sequence[int]], begin: int, checked: Sequence[CheckedSection]
) -> list[Column]:
    """Read the addresses of the units, and check that they are as the sections say."""
    at, units, columns = begin, 0, list[Column]()
    used = {one.column for one in checked}
    if used != set(range(len(heads))):
        raise wrong(f"has {len(heads)} columns of addresses, and its sections name {sorted(used)[:8]}")
    from kvplan.plan.packing import column_loops  # loads numba

    for number, (count, first, given, width, root) in enumerate(heads):
        step, units = given, units + count
        if not (0 <= count <= units <= LIMITS.recipe_units and 0 <= first < ADDRESSES and 1 <= step <= REACH):
            raise wrong(f"has a column of {count:,} units, from {first:#x} in steps of {step:,}")
        if width:
            nbytes = count * width
            if width not in WIDTHS or root != number or at + nbytes > len(recipe):
                raise wrong("is cut off")
            index = np.frombuffer(recipe, dtype=WIDTHS[width], count=count, offset=at)
            at += nbytes + -nbytes % 8
            addresses = np.empty(count, np.int64)
            low, high = count and ADDRESSES, 0
            for some in column_loops.pieces(count):
                ends = column_loops.addresses_of(index[some], first, step, addresses[some])
                low, high = min(low, int(ends[0])), max(high, int(ends[1]))
            if high > (ADDRESSES - first) // step:
                raise wrong("has a unit beyond all addresses")
            low, high = first + step * low, first + step * high
        else:
            if not 0 <= root < number or columns[root].addresses.size != count:
                raise wrong(f"repeats column {root}, which is not there")
            addresses, step, low, high = columns[root]
            if count:
                far = first - int(addresses[0])
                low, high = low + far, high + far
                if low < 0 or high > ADDRESSES:
                    raise wrong("has a unit beyond all addresses")
                addresses = addresses + far
        columns.append(Column(addresses, step, low, high))
    if at != len(recipe):
        raise wrong(f"has {len(recipe) - at} bytes too many")
    for one in checked:
        column = columns[one.column]
        if column.addresses.size and (
            column.step % one.place.step or int(column.addresses[0]) % one.place.step != one.place.residue
        ):
            raise wrong("has units that are not as aligned as it says")
    return columns

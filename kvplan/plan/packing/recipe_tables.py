"""The part of a recipe that all transfers of a program share: its sections and runs, checked, as run groups."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kvplan.base.limits import LIMITS
from kvplan.errors import TransferError
from kvplan.layout.strides import Int64Array
from kvplan.plan.packing.pack_checks import Extents, extents_of
from kvplan.plan.packing.pack_order import GRAIN, REACH, Place, half_group
from kvplan.program.program import Run, RunGroup

SECTION, RUN = 5, 9  # words of a row


class CheckedSection(NamedTuple):
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


# The shared parts that were read last, with their copies: a GPU uploads the run tables of a part once. Another process
# chooses them, so the copies of all of them are bounded. No lock, since a fork could leave it held.
_kept: OrderedDict[tuple[bytes, int, str], tuple[int, tuple[CheckedSection, ...]]] = OrderedDict()
KEPT = 256  # most parts


def checked_sections(part: bytes, count: int, side: str) -> tuple[CheckedSection, ...]:
    """Check the sections and runs of a recipe, and make their run groups; equal parts give the same groups.

    Args:
        part: the rows of the sections, and of the runs.
        count: number of sections.
        side: ``"src"`` or ``"dst"``.

    Raises:
        TransferError: they are malformed, or too large.
    """
    key = part, count, side
    known = _kept.pop(key, None)
    if known is None:
        made = _read_sections(part, count, side)
        known = sum(section.group.packed.shape[1] for section in made), made
    known = _kept.setdefault(key, known)  # two threads get the same groups; it is the last to go now
    with suppress(KeyError, RuntimeError):  # of another thread that changes them, too
        while len(_kept) > 1 and (
            len(_kept) > KEPT or sum(copies for copies, _ in _kept.values()) > LIMITS.recipe_copies
        ):
            _kept.popitem(last=False)
    return known[1]


def wrong(text: str) -> TransferError:
    """Return the error of a wrong recipe."""
    return TransferError(f"a recipe from a peer {text}")


def _read_sections(part: bytes, count: int, side: str) -> tuple[CheckedSection, ...]:
    """Check the sections and runs of a recipe, and make their run groups."""
    words = np.frombuffer(part, dtype="<i8").astype(np.int64, copy=False)
    heads, rows = words[: SECTION * count].reshape(-1, SECTION), words[SECTION * count :].reshape(-1, RUN)
    for column, runs, unit_nbytes, step, residue in heads.tolist():
        numbers = 0 <= column < count and 1 <= runs <= len(rows) and 1 <= unit_nbytes < REACH
        if not (numbers and 1 <= step <= REACH and 0 <= residue < step):
            raise wrong(f"has a section {(column, runs, unit_nbytes, step, residue)} that cannot be")
    if int(heads[:, 1].sum()) != len(rows):
        raise wrong(f"has {len(rows)} runs, and its sections {int(heads[:, 1].sum())}")
    _check_rows(rows)
    made, at, grain = [], 0, GRAIN
    for column, runs, unit_nbytes, step, residue in heads.tolist():
        place = Place(step, residue)
        group = half_group(side, _runs(rows[at : at + runs]), place, unit_nbytes)
        at += runs
        if grain % min(group.alignment, GRAIN):
            raise wrong("has sections whose units would lose their alignment in a chunk")
        grain = min(grain, unit_nbytes & -unit_nbytes)
        made.append(CheckedSection(column, group, unit_nbytes, place, _covering(group, unit_nbytes, side)))
    return tuple(made)


def _check_rows(rows: Int64Array) -> None:
    """Check that no number of the runs is out of range, so that no sum of them overflows."""
    counts, strides = rows[:, [3, 6]], rows[:, [[4, 5], [7, 8]]]
    fine = (rows[:, 0] > -REACH).all() and (rows[:, 1] >= 0).all() and (rows[:, 2] >= 1).all()
    small = (rows[:, :3] < REACH).all() and (counts >= 1).all() and (counts <= LIMITS.recipe_copies).all()
    if not (fine and small and (strides > -REACH).all() and (np.abs(strides) <= REACH // counts[:, :, None]).all()):
        raise wrong("has a run whose numbers are out of range")
    if int(counts.prod(axis=1).sum()) > LIMITS.recipe_copies:
        raise wrong(f"makes over {LIMITS.recipe_copies:,} copies of a unit")


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
        raise wrong(f"leaves bytes of a unit's {unit_nbytes:,} in the chunk out, or names them twice")
    return extents_of(cache, size)

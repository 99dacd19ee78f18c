"""The inverse map: from byte addresses back to (layer, part, block, token, head, byte).

The map adds up one offset for each digit of each axis. The inverse map is a search over those digits, the largest
stride first. It skips branches that cannot reach the address. If strides nest, one branch per level remains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvplan.base.files import LIMITS
from kvplan.errors import KVPlanError
from kvplan.layout.components import Component, Form
from kvplan.layout.strides import span

BLOCK, TOKEN, HEAD, BYTE = range(4)

Step = tuple[int, int, int, int]  # (axis, coordinates per digit, digits, stride in bytes)
Coordinates = tuple[int, int, int, int]  # (block, token, head, byte), each from 0


class Row(NamedTuple):
    """The coordinates of one byte of content.

    Attributes:
        layer: global number of the layer.
        part: name of the part.
        block: block id.
        token: slot within the block; None if the block is opaque.
        head: global number of the head; None if the content belongs to no head.
        byte: number of the byte within the row of that (token, head), from 0.
        subblock: number of the opaque sub-block within the block; None if a block has token slots or is one sub-block.
    """

    layer: int
    part: str
    block: int
    token: int | None
    head: int | None
    byte: int
    subblock: int | None = None


def row_of(component: Component, coordinates: Coordinates) -> Row:
    """Return the coordinates of a byte of a component as a row, with global numbers."""
    form, (block, token, head, byte) = component.form, coordinates
    return Row(
        component.layer,
        component.part,
        block,
        None if form.opaque else token,
        form.head_start + head if form.headed else None,
        byte,
        token if form.subblocks > 1 else None,
    )


def find(components: Iterable[Component], address: int) -> tuple[Component, Coordinates, int] | None:
    """Return the component and coordinates of one byte, and its offset in its block; None for a byte of padding."""
    for component in components:
        first, end = component.hull()
        if not first <= address < end:
            continue
        at, inner = address - component.address, steps_of(component.form, blocks=False)
        for block, start in blocks_in(component.form, at, at + 1):
            for (_, token, head, byte), inside, _ in pieces(inner, at - start, at - start + 1):
                return component, (block, token, head, byte), inside
    return None


def check_rows(looked: int) -> None:
    """Check that one lookup of addresses does not take too much work.

    Raises:
        KVPlanError: the lookup visits too many rows.
    """
    if looked > LIMITS.listed:
        raise KVPlanError(f"the range crosses more than {LIMITS.listed:,} rows; ask for fewer bytes")


def steps_of(form: Form, *, blocks: bool) -> tuple[Step, ...]:
    """Return the factors of the axes inside a block, or of all axes, as steps; the largest stride first.

    >>> steps_of(Form(block=((4, 64),), token=((4, 16),), head=(), dim=((16, 1),)), blocks=True)
    ((0, 1, 4, 64), (1, 1, 4, 16), (3, 1, 16, 1))
    """
    steps: list[Step] = []
    axes = ((BLOCK, form.block if blocks else ()), (TOKEN, form.token), (HEAD, form.head), (BYTE, form.dim))
    for axis, factors in axes:
        weight = 1
        for count, stride in reversed(factors):
            steps.append((axis, weight, count, stride))
            weight *= count
    return tuple(sorted(steps, key=lambda step: -step[3]))


def pieces(steps: Sequence[Step], low: int, high: int) -> Iterator[tuple[Coordinates, int, int]]:
    """Yield all content at offsets from ``low`` up to ``high`` as pieces of rows: (coordinates, offset, bytes).

    >>> list(pieces(((1, 1, 4, 20), (3, 1, 16, 1)), 18, 42))
    [((0, 1, 0, 0), 20, 16), ((0, 2, 0, 0), 40, 2)]
    """
    reaches = _reaches(steps)

    def walk(k: int, at: int, where: Coordinates) -> Iterator[tuple[Coordinates, int, int]]:
        if k == len(steps):
            if low <= at < high:
                yield where, at, 1
            return
        axis, weight, count, stride = steps[k]
        first = max(0, -((at + reaches[k + 1] - low) // stride))
        last = min(count - 1, (high - 1 - at) // stride)
        if k == len(steps) - 1 and axis == BYTE and stride == 1 == weight:  # contiguous bytes are one piece
            if first <= last:
                yield _moved(where, axis, first), at + first, last - first + 1
            return
        for digit in range(first, last + 1):
            yield from walk(k + 1, at + digit * stride, _moved(where, axis, digit * weight))

    yield from walk(0, 0, (0, 0, 0, 0))


def _moved(where: Coordinates, axis: int, by: int) -> Coordinates:
    block, token, head, byte = (at + by * (axis == k) for k, at in enumerate(where))
    return block, token, head, byte


def _reaches(steps: Sequence[Step]) -> list[int]:
    """Return, for each step, the largest offset that this step and all later steps add up to; at the end, a 0."""
    return [sum((count - 1) * stride for _, _, count, stride in steps[k:]) for k in range(len(steps) + 1)]


def blocks_in(form: Form, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield (block id, offset) of every block whose byte range overlaps offsets from ``low`` up to ``high``."""
    reach = span(form.inner)
    if form.table is not None:
        yield from ((block, at) for block, at in enumerate(form.table) if low - reach <= at < high)
        return
    steps = tuple(step for step in steps_of(form, blocks=True) if step[0] == BLOCK)
    for where, at, _ in pieces(steps, low - reach, high):
        yield where[BLOCK], at


def runs_in(component: Component, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the contiguous runs of a component between two addresses, as (first, one past the last)."""
    first, end = component.hull()
    if stop <= first or end <= start:
        return
    nbytes, outer = 1, list[Step]()
    for step in reversed(steps_of(component.form, blocks=False)):
        if step[3] == nbytes:
            nbytes *= step[2]
        else:
            outer.insert(0, step)
    steps = (*outer, (BYTE, 1, nbytes, 1))
    low, high = start - component.address, stop - component.address
    for _, block in blocks_in(component.form, low, high):
        for looked, (_, at, size) in enumerate(pieces(steps, low - block, high - block)):
            check_rows(looked)
            yield component.address + block + at, component.address + block + at + size


def last_before(component: Component, address: int) -> int | None:
    """Return the address of the last byte of content of a component before an address; None if there is none.

    >>> rows = Component(0, "kv", 100, Form(block=(), token=((4, 20),), head=(), dim=((16, 1),)))
    >>> last_before(rows, 120), last_before(rows, 100)
    (115, None)
    """
    form, (first, end) = component.form, component.hull()
    if not first < address < end:
        return end - 1 if address >= end else None
    found = _highest(form, (0,) if form.table is None else form.table, address - 1 - component.address)
    return None if found is None else component.address + found


def first_from(component: Component, address: int) -> int | None:
    """Return the address of the first byte of content of a component at an address or after it, or None.

    >>> rows = Component(0, "kv", 100, Form(block=(), token=((4, 20),), head=(), dim=((16, 1),)))
    >>> first_from(rows, 116), first_from(rows, 176)
    (120, None)
    """
    form, (first, end) = component.form, component.hull()
    if not first < address < end:
        return first if address <= first else None
    # Read from its end, a form has the same steps. The first byte after an address is then the last byte before it.
    if form.table is None:
        total, starts = _reaches(steps_of(form, blocks=True))[0], [0]
    else:
        total = max(form.table) + span(form.inner)
        starts = [total - span(form.inner) - at for at in form.table]
    found = _highest(form, starts, total + component.address - address)
    return None if found is None else component.address + total - found


def _highest(form: Form, starts: Sequence[int], limit: int) -> int | None:
    """Return the largest offset of content that is at most ``limit``; ``starts`` are the table's entries, or just 0."""
    steps = steps_of(form, blocks=form.table is None)
    reach = _reaches(steps)[0]
    best: int | None = None
    for at in sorted((at for at in starts if at <= limit), reverse=True):
        if best is not None and at + reach <= best:
            break
        held = at + highest(steps, limit - at)
        best = held if best is None else max(best, held)
    return best


def highest(steps: Sequence[Step], limit: int) -> int:
    """Return the largest offset that the steps add up to and that is at most ``limit``, which is at least 0.

    >>> highest(((1, 1, 4, 20), (3, 1, 16, 1)), 58), highest(((1, 1, 4, 20), (3, 1, 16, 1)), 41)
    (55, 41)
    """
    reaches, looked = _reaches(steps), 0

    def walk(k: int, limit: int) -> int:
        nonlocal looked
        looked += 1
        check_rows(looked)
        if k == len(steps):
            return 0
        _, _, count, stride = steps[k]
        best = -1
        for digit in range(min(count - 1, limit // stride), -1, -1):
            if digit * stride + reaches[k + 1] <= best:
                break
            best = max(best, digit * stride + walk(k + 1, limit - digit * stride))
        return best

    return walk(0, limit)

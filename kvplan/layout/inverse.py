"""Forms the other way round: which coordinates lie at given offsets, and what content is nearest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvplan.base.limits import ROWS
from kvplan.errors import KVPlanError
from kvplan.layout.components import Component, Form, Region
from kvplan.layout.strides import span

BLOCK, TOKEN, HEAD, BYTE = range(4)

Step = tuple[int, int, int, int]  # (axis, coordinates a digit, digits, stride in bytes)
Coordinates = tuple[int, int, int, int]  # (block, token, head, byte), each from 0


def check_pieces(looked: int) -> None:
    """A question that an answer can be had for in seconds.

    Raises:
        KVPlanError: too many rows were looked at.
    """
    if looked > ROWS:
        raise KVPlanError(f"the range crosses more than {ROWS:,} rows; ask for fewer bytes")


def steps_of(form: Form, *, blocks: bool) -> tuple[Step, ...]:
    """Factors of the axes inside a block, or of all axes; the largest stride first.

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
    """(coordinates, offset, bytes) of all content at offsets from ``low`` up to ``high``, in pieces of rows.

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
        if k == len(steps) - 1 and axis == BYTE and stride == 1 == weight:  # bytes one after another
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
    """Largest offset that the steps from each one on can make."""
    return [sum((count - 1) * stride for _, _, count, stride in steps[k:]) for k in range(len(steps) + 1)]


def blocks_in(form: Form, low: int, high: int) -> Iterator[tuple[int, int]]:
    """(block id, its offset) of the blocks whose first to last byte meets offsets from ``low`` up to ``high``."""
    reach = span(form.inner)
    if form.table is not None:
        yield from ((block, at) for block, at in enumerate(form.table) if low - reach <= at < high)
        return
    steps = tuple(step for step in steps_of(form, blocks=True) if step[0] == BLOCK)
    for where, at, _ in pieces(steps, low - reach, high):
        yield where[BLOCK], at


def runs_in(component: Component, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Contiguous (first, one past the last) of one component between two addresses, whichever rows they hold."""
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
            check_pieces(looked)
            yield component.address + block + at, component.address + block + at + size


def last_before(component: Component, address: int, region: Region) -> int | None:
    """Address of the last byte of content of a component before ``address``, in one region."""
    form, limit = component.form, address - 1 - component.address
    if form.table is None:
        found = highest(steps_of(form, blocks=True), limit)
    else:
        found = _highest_of_blocks(form, form.table, limit)
    return None if found is None or component.address + found < region.address else component.address + found


def first_from(component: Component, address: int, region: Region) -> int | None:
    """Address of the first byte of content of a component at ``address`` or behind it, in one region."""
    # Offsets counted from the other end make it the question above.
    form, limit = component.form, address - component.address
    if form.table is None:
        steps = steps_of(form, blocks=True)
        total = _reaches(steps)[0]
        mirrored = highest(steps, total - limit)
    else:
        total = max(form.table) + span(form.inner)
        mirrored = _highest_of_blocks(form, [total - span(form.inner) - at for at in form.table], total - limit)
    found = None if mirrored is None else component.address + total - mirrored
    return None if found is None or found >= region.end else found


def highest(steps: Sequence[Step], limit: int) -> int | None:
    """Largest offset of content that is at most ``limit``.

    >>> highest(((1, 1, 4, 20), (3, 1, 16, 1)), 58), highest(((1, 1, 4, 20), (3, 1, 16, 1)), 41)
    (55, 41)
    """
    reaches, looked = _reaches(steps), 0

    def walk(k: int, limit: int) -> int:
        nonlocal looked
        looked += 1
        check_pieces(looked)
        if k == len(steps):
            return 0
        _, _, count, stride = steps[k]
        best = -1
        for digit in range(min(count - 1, limit // stride), -1, -1):
            if digit * stride + reaches[k + 1] <= best:
                break
            best = max(best, digit * stride + walk(k + 1, limit - digit * stride))
        return best

    return walk(0, limit) if limit >= 0 else None


def _highest_of_blocks(form: Form, table: Sequence[int], limit: int) -> int | None:
    inner, reach = steps_of(form, blocks=False), span(form.inner)
    best: int | None = None
    for at in sorted((at for at in table if at <= limit), reverse=True):
        if best is not None and at + reach <= best:
            break
        held = at + (highest(inner, limit - at) or 0)
        best = held if best is None else max(best, held)
    return best

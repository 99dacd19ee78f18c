"""Check that components of a layout share no byte: by a proof if strides nest, otherwise by cutting down to runs.

The bytes of a component are a box: a run of bytes that a list of factors repeats. The strides of caches nest: each
stride is larger than all bytes that it steps over, which one pass over the sorted factors proves. Boxes of several
components are swept by address. Where some overlap from end to end, steps that all of them share are dropped, and
otherwise the widest boxes are cut along their largest stride.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvplan.base.files import Budget
from kvplan.errors import LayoutError
from kvplan.layout.address_ranges import check_places
from kvplan.layout.components import Component, Form
from kvplan.layout.strides import Factors, normal, span

STEPS = 4  # of the budget, for each box that is looked at


class _Box(NamedTuple):
    """Bytes of a component: a run at ``first``, repeated by factors.

    Attributes:
        first: address of the first byte.
        nbytes: bytes of the run.
        factors: factors that repeat the run, the largest stride first.
        owner: number of the component.
        block: block id; None if the box has all blocks.
    """

    first: int
    nbytes: int
    factors: Factors
    owner: int
    block: int | None = None

    @property
    def end(self) -> int:
        return self.first + span(self.factors) + self.nbytes

    def cut(self) -> Iterator[_Box]:
        """Yield one box for each step of the largest stride."""
        count, stride = self.factors[0]
        for k in range(count):
            yield self._replace(first=self.first + k * stride, factors=self.factors[1:])


def check_disjoint(components: Sequence[Component], budget: Budget | None = None) -> None:
    """Check that no byte belongs to two coordinates.

    Args:
        components: all components of a layout.
        budget: limits of the work for the whole document that contains the layout.

    Raises:
        LayoutError: a component overlaps itself or another component, or the search would take too many steps.
    """
    budget = budget or Budget()
    boxes: dict[int, tuple[int, Factors]] = {}  # of each form, by identity: the run, and the factors around it
    for component in reversed(components):
        if id(component.form) not in boxes:
            boxes[id(component.form)] = run = _run(component.form)
            if _overlaps_itself(_Box(0, *run, 0), budget):
                raise LayoutError(
                    f"{component} overlaps itself: two coordinates share bytes (an expanded dim, or a stride smaller "
                    "than what it steps over)"
                )
    tables = {component.form.table for component in components}
    every = [_Box(c.address, *boxes[id(c.form)], owner) for owner, c in enumerate(components)]
    if tables != {None} and not _blocks_apart(every, tables):
        every = list(_in_each_block(components, every))
    clash = _clash(every, budget)
    if clash is not None:
        names = (f"{components[box.owner]}" + f" of block {box.block}" * (box.block is not None) for box in clash)
        raise LayoutError(f"{' and '.join(names)} overlap: they share bytes")


def _run(form: Form) -> tuple[int, Factors]:
    """Return the bytes of a run, and the factors that repeat it, without the blocks of a table."""
    factors = sorted_factors((*form.block, *form.inner))
    return (factors[-1][0], factors[:-1]) if factors and factors[-1][1] == 1 else (1, factors)


def sorted_factors(factors: Iterable[tuple[int, int]]) -> Factors:
    """Return factors in normal form, sorted by stride, the largest first. The set of offsets stays the same.

    >>> sorted_factors(((16, 8), (8, 1), (4, 128)))
    ((512, 1),)
    """
    return normal(sorted(factors, key=lambda factor: -factor[1]))


def nests(factors: Factors) -> bool:
    """Tell whether every stride is larger than the span of all smaller strides. Then no coordinates share an offset.

    >>> nests(((4, 64), (64, 1))), nests(((2, 3), (3, 2))), nests(((4, 0),))
    (True, False, False)
    """
    reach = 0
    for count, stride in sorted(factors, key=lambda factor: factor[1]):
        if count == 1:
            continue
        if stride <= reach:
            return False
        reach += (count - 1) * stride
    return True


def _overlaps_itself(box: _Box, budget: Budget) -> bool:
    """Tell whether two coordinates of a box share a byte."""
    if nests((*box.factors, (box.nbytes, 1))):
        return False
    if box.factors[-1][1] == 0:
        return True
    (count, stride), inside = box.factors[0], box._replace(factors=box.factors[1:])
    # Steps are alike, so the first one is compared with those that begin before its end.
    near = range(1, min(count - 1, (inside.end - inside.first - 1) // stride) + 1)
    return _overlaps_itself(inside, budget) or any(
        _clash([inside, inside._replace(first=inside.first + k * stride)], budget) is not None for k in near
    )


def _blocks_apart(every: Sequence[_Box], tables: Iterable[tuple[int, ...] | None]) -> bool:
    """Tell whether all boxes have one table, whose blocks do not overlap. Then one block of all is compared."""
    table, *others = tables
    if table is None or others:
        return False
    hull = max(box.end for box in every) - min(box.first for box in every)
    return not np.any(np.diff(np.sort(np.array(table, dtype=np.int64))) < hull)


def _in_each_block(components: Sequence[Component], every: Sequence[_Box]) -> Iterator[_Box]:
    """Yield the boxes that overlap another one from end to end, one for each block of a table."""
    tables = [component.form.table for component in components]
    counts = [1 if table is None else len(table) for table in tables]
    check_places(sum(counts))
    known = {id(table): np.array(table or (0,), dtype=np.int64) for table in tables}
    starts = np.concatenate([box.first + known[id(table)] for box, table in zip(every, tables, strict=True)])
    ends = starts + np.repeat(np.array([box.end - box.first for box in every], dtype=np.int64), counts)
    owners, first = np.repeat(np.arange(len(every)), counts), np.cumsum(counts) - counts
    order = np.argsort(starts, kind="stable")
    meets = starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]
    for at in order[np.append(meets, False) | np.append(False, meets)].tolist():
        owner = int(owners[at])
        block = None if tables[owner] is None else at - int(first[owner])
        yield every[owner]._replace(first=int(starts[at]), block=block)


def _clash(boxes: Sequence[_Box], budget: Budget) -> tuple[_Box, _Box] | None:
    """Return two boxes that share a byte, or None. No box overlaps itself."""
    budget.step(STEPS * len(boxes))
    for cluster in _clusters(boxes):
        if len(cluster) == 1:
            continue
        runs = [box for box in cluster if not box.factors]
        if len(runs) == len(cluster):
            return cluster[0], cluster[1]
        outer = {box.factors[:1] for box in cluster}
        inside = [box._replace(factors=box.factors[1:]) for box in cluster]
        if len(outer) == 1 and max(box.end for box in inside) - inside[0].first <= cluster[0].factors[0][1]:
            clash = _clash(inside, budget)  # bytes of one step do not overlap bytes of the next
        else:
            wide = max(box.end - box.first for box in cluster if box.factors) / 2
            cut = [box.factors != () and box.end - box.first >= wide for box in cluster]
            count = sum(box.factors[0][0] for box, some in zip(cluster, cut, strict=True) if some)
            budget.step(STEPS * count)
            pieces = (box.cut() if some else (box,) for box, some in zip(cluster, cut, strict=True))
            clash = _clash([piece for some in pieces for piece in some], budget)
        if clash is not None:
            return clash
    return None


def _clusters(boxes: Sequence[_Box]) -> Iterator[list[_Box]]:
    """Yield boxes whose ranges of addresses overlap, in order of address."""
    cluster: list[_Box] = []
    reach = 0
    for box in sorted(boxes, key=lambda box: box.first):
        if cluster and box.first >= reach:
            yield cluster
            cluster = []
        cluster.append(box)
        reach = max(reach, box.end) if len(cluster) > 1 else box.end
    if cluster:
        yield cluster

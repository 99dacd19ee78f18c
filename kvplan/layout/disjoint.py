"""Check that components of a layout share no byte: by a proof if strides nest, otherwise by cutting down to runs.

The bytes of a component are a box: a run of bytes that a list of factors repeats. The strides of caches nest: each
stride is larger than all bytes that it steps over, which one pass over the sorted factors proves. Boxes of several
components are swept by address. Where some overlap from end to end, steps that all of them share are dropped, and
otherwise the widest boxes are cut along their largest stride.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvplan.base.files import Budget
from kvplan.errors import LayoutError
from kvplan.layout.address_ranges import check_places
from kvplan.layout.components import Component
from kvplan.layout.strides import Factors, run_of, span

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
    owner: int = 0
    block: int | None = None

    @property
    def end(self) -> int:
        return self.first + span(self.factors) + self.nbytes

    def steps(self, count: int | None = None) -> Iterator[_Box]:
        """Yield one box for each of the first ``count`` steps of the largest stride."""
        (every, stride), *inner = self.factors
        for k in range(every if count is None else min(count, every)):
            yield self._replace(first=self.first + k * stride, factors=tuple(inner))


def check_disjoint(components: Sequence[Component], budget: Budget | None = None) -> None:
    """Check that no byte belongs to two coordinates.

    Args:
        components: all components of a layout.
        budget: limits of the work for the whole document that contains the layout.

    Raises:
        LayoutError: a component overlaps itself or another component, or the search would take too many steps.
    """
    budget = budget or Budget()
    runs: dict[int, tuple[int, Factors]] = {}  # of each form, by identity
    for component in reversed(components):
        if id(component.form) not in runs:
            runs[id(component.form)] = run = run_of((*component.form.block, *component.form.inner))
            if _overlaps_itself(_Box(0, *run), budget):
                why = "an expanded dim, or a stride smaller than what it steps over"
                raise LayoutError(f"{component} overlaps itself: two coordinates share bytes ({why})")
    boxes = [_Box(c.address, *runs[id(c.form)], owner) for owner, c in enumerate(components)]
    clash = _clash(_in_each_block([component.form.table for component in components], boxes), budget)
    if clash is not None:
        names = (f"{components[box.owner]}" + f" of block {box.block}" * (box.block is not None) for box in clash)
        raise LayoutError(f"{' and '.join(names)} overlap: they share bytes")


def _overlaps_itself(box: _Box, budget: Budget) -> bool:
    """Tell whether two coordinates of a box share a byte."""
    reach = box.nbytes - 1
    for count, stride in reversed(box.factors):
        if stride <= reach:
            break
        reach += (count - 1) * stride
    else:
        return False  # each stride is larger than all that it steps over
    if box.factors[-1][1] == 0:
        return True
    # Steps are alike, so the first one is compared with those that begin before its end.
    inside = next(box.steps())
    _, *near = box.steps((inside.end - inside.first - 1) // box.factors[0][1] + 1)
    return _overlaps_itself(inside, budget) or any(_clash([inside, other], budget) is not None for other in near)


def _in_each_block(tables: Sequence[tuple[int, ...] | None], boxes: Sequence[_Box]) -> Sequence[_Box]:
    """Return boxes of which one stands for all blocks if blocks do not overlap; else those of blocks that may."""
    known = {id(table): table for table in tables}
    arrays = {key: np.array(table or (0,), dtype=np.int64) for key, table in known.items()}
    different = set(known.values())
    if different == {None}:
        return boxes
    if len(different) == 1:
        hull = max(box.end for box in boxes) - min(box.first for box in boxes)
        if np.all(np.diff(np.sort(arrays[id(tables[0])])) >= hull):
            return boxes
    counts = [len(arrays[id(table)]) for table in tables]
    check_places(sum(counts))
    starts = np.concatenate([box.first + arrays[id(table)] for box, table in zip(boxes, tables, strict=True)])
    ends = starts + np.repeat(np.array([box.end - box.first for box in boxes], dtype=np.int64), counts)
    owners, first = np.repeat(np.arange(len(boxes)), counts), np.cumsum(counts) - counts
    order = np.argsort(starts, kind="stable")
    meets = starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]
    met = order[np.append(meets, False) | np.append(False, meets)].tolist()
    blocks = (None if tables[owners[at]] is None else at - int(first[owners[at]]) for at in met)
    return [
        boxes[owners[at]]._replace(first=int(starts[at]), block=block) for at, block in zip(met, blocks, strict=True)
    ]


def _clash(boxes: Sequence[_Box], budget: Budget) -> tuple[_Box, _Box] | None:
    """Return two boxes that share a byte, or None. No box overlaps itself."""
    budget.step(STEPS * len(boxes))
    for cluster in _clusters(boxes):
        if not any(box.factors for box in cluster):
            return cluster[0], cluster[1]
        inside = [box._replace(factors=box.factors[1:]) for box in cluster]
        alike = len({box.factors[:1] for box in cluster}) == 1
        if alike and max(box.end for box in inside) - inside[0].first <= cluster[0].factors[0][1]:
            clash = _clash(inside, budget)  # bytes of one step do not overlap bytes of the next
        else:
            wide = max(box.end - box.first for box in cluster if box.factors) / 2
            cut = [box for box in cluster if box.factors and box.end - box.first >= wide]
            budget.step(STEPS * sum(box.factors[0][0] for box in cut))
            rest = [box for box in cluster if not box.factors or box.end - box.first < wide]
            clash = _clash([*rest, *(piece for box in cut for piece in box.steps())], budget)
        if clash is not None:
            return clash
    return None


def _clusters(boxes: Sequence[_Box]) -> Iterator[list[_Box]]:
    """Yield boxes of which each overlaps another one, from end to end, in order of address."""
    cluster: list[_Box] = []
    reach = 0
    for box in sorted(boxes, key=lambda box: box.first):
        if cluster and box.first >= reach:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(box)
        reach = max(reach, box.end) if len(cluster) > 1 else box.end
    if len(cluster) > 1:
        yield cluster

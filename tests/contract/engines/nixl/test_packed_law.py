"""The law of packed rows: whatever the lists and the indices, memory holds what one copy a descriptor would leave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.engines.nixl.pair import PackedPair, heard

POOL = 300 * 64  # bytes of each pool


@dataclass(frozen=True)
class Rows:
    """A list: rows of (start, bytes, stride, count)."""

    rows: tuple[tuple[int, int, int, int], ...]

    @property
    def descriptors(self):
        return [(start + k * stride, nbytes) for start, nbytes, stride, count in self.rows for k in range(count)]

    def table(self, base):
        return np.array(
            [(base + start, nbytes, 0, stride, count) for start, nbytes, stride, count in self.rows], np.uint64
        )


@st.composite
def pairs_of_lists(draw):
    """Draw two lists, the indices of equal sizes in them, and the operation."""
    sizes = draw(st.lists(st.sampled_from((1, 8, 24, 64, 200, 576, 5000)), min_size=1, max_size=2))
    lists = []
    for _ in range(2):
        rows = []
        for size in sizes:
            stride = size + draw(st.sampled_from((0, 1, 8, 40)))
            count = draw(st.integers(1, max(1, min(120, (POOL // 2 - size) // stride))))
            most = POOL // 2 - (count - 1) * stride - size
            rows.append((draw(st.integers(0, most)) + len(rows) * POOL // 2, size, stride, count))
        lists.append(Rows(tuple(rows)))
    counts = [[row[3] for row in one.rows] for one in lists]
    here, there = [], []
    for k in range(len(sizes)):
        many = draw(st.integers(1, min(counts[0][k], counts[1][k])))
        for chosen, its in zip((here, there), counts, strict=True):
            order = draw(st.permutations(range(its[k]))) if draw(st.booleans()) else range(its[k])
            chosen += [sum(its[:k]) + one for one in order[:many]]
    return lists, here, there, draw(st.sampled_from(("READ", "WRITE")))


@pytest.fixture(scope="module")
def pair():
    made = PackedPair(POOL // 64)
    yield made
    made.close()


@given(drawn=pairs_of_lists(), seed=st.integers(0, 1 << 30))
def test_every_byte_is_where_one_copy_a_descriptor_would_put_it(pair, drawn, seed):
    lists, here, there, operation = drawn
    rng = np.random.default_rng(seed)
    for pool in pair.pools:
        pool[:] = rng.integers(0, 256, pool.shape, np.uint8)
    expected = [pool.copy() for pool in pair.pools]
    mine, theirs = [pool.ravel() for pool in expected]
    for a, b in zip(here, there, strict=True):
        (at, size), (to, _) = lists[0].descriptors[a], lists[1].descriptors[b]
        if operation == "READ":
            mine[at : at + size] = theirs[to : to + size]
        else:
            theirs[to : to + size] = mine[at : at + size]
    agent = pair.agents[0]
    made = [
        agent.prep_xfer_dlist(name, one.table(pool.ctypes.data), "DRAM")
        for name, one, pool in zip(("", pair.name), lists, pair.pools, strict=True)
    ]
    note = b"%d" % seed
    handle = agent.make_prepped_xfer(operation, made[0], np.array(here), made[1], np.array(there), note)
    agent.transfer(handle)
    pair.finish(handle)
    assert agent.query_xfer_backend(handle) == "KVPLAN"
    for pool, want in zip(pair.pools, expected, strict=True):
        np.testing.assert_array_equal(pool, want)
    assert heard(pair.agents[1]) == [note]
    for one in (handle, *made):
        one.release()

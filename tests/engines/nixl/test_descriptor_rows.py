"""Descriptor lists as arrays: the same descriptors as NIXL counts them, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVPlanError
from kvplan.engines.nixl import descriptor_rows
from kvplan.engines.nixl.descriptor_rows import Rows, rows_of
from kvplan.engines.nixl.spans import Registered, Span, Spans
from kvplan.plan.row_plans import Memory, layout_of
from tests.engines.nixl.nixl_double import Descriptors

numbers = st.integers(1, 1 << 40)
strided = st.tuples(numbers, st.integers(1, 4096), st.integers(0, 7), st.integers(0, 8192), st.integers(1, 9))


def one_by_one(table):
    return [(address + k * stride, size) for address, size, _, stride, count in table for k in range(count)]


@given(st.lists(strided, min_size=1, max_size=6), st.data(), st.booleans())
def test_descriptors_are_counted_as_nixl_counts_them(table, data, kept):
    rows, wanted = Rows.of(np.array(table, dtype=np.uint64), "VRAM"), one_by_one(table)
    assert len(rows) == len(wanted)
    chosen = np.array(data.draw(st.lists(st.integers(0, len(wanted) - 1), min_size=1, max_size=20)))
    limit = descriptor_rows.MOST_EXPANDED
    descriptor_rows.MOST_EXPANDED = limit if kept else 0
    try:
        found = rows.addresses(chosen).tolist(), rows.sizes(chosen).tolist()
    finally:
        descriptor_rows.MOST_EXPANDED = limit
    assert list(zip(*found, strict=True)) == [wanted[k] for k in chosen]
    assert rows.one_size == (wanted[0][1] if len({size for _, size in wanted}) == 1 else 0)
    assert all(not address % rows.alignment and not size % rows.alignment for address, size in wanted)
    assert rows.ends.tolist() == [a + (n - 1) * stride + size for a, size, _, stride, n in table]


@given(st.lists(st.tuples(numbers, numbers, st.integers(0, 7)), min_size=1, max_size=6))
def test_lists_without_strides_and_nixl_s_own_lists_are_read(table):
    rows, same = Rows.of(np.array(table, dtype=np.int64), "cpu"), rows_of(Descriptors("DRAM", table))
    every = np.arange(len(table))
    for one in (rows, same):
        assert one.kind == "DRAM"
        assert (
            list(zip(one.addresses(every).tolist(), one.sizes(every).tolist(), one.device.tolist(), strict=True))
            == table
        )


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (np.zeros((0, 3), np.int64), "DRAM"),
        (np.zeros((1, 4), np.int64), "DRAM"),
        (np.zeros(3, np.int64), "DRAM"),
        (np.ones((1, 3)), "DRAM"),
        (np.ones((1, 3), np.int64), "FILE"),
        (np.array([[1 << 63, 8, 0]], np.uint64), "VRAM"),
        (np.array([[4096, 0, 0]]), "DRAM"),
        (np.array([[4096, 8, 0, 8, 0]]), "DRAM"),
    ],
)
def test_other_lists_are_refused(table, kind):
    with pytest.raises(KVPlanError):
        Rows.of(table, kind)


def test_lists_of_other_memory_are_refused():
    for descriptors in (Descriptors("FILE", [(0, 8, 3)]), Descriptors("DRAM", [])):
        with pytest.raises(KVPlanError):
            rows_of(descriptors)


def test_rows_are_placed_where_a_peer_s_memory_is_mapped():
    layout = layout_of([Memory(1 << 20, 100, "cpu"), Memory(1 << 21, 50, "cpu")])
    other = layout_of([Memory(1 << 22, 100, "cpu")])
    spans = Spans([
        Span("DRAM", 5000, 50, 1 << 21, layout), Span("DRAM", 1000, 100, 1 << 20, layout),
        Span("DRAM", 9000, 100, 1 << 22, other), Span("VRAM", 20000, 100, 1 << 22, other),
    ])  # fmt: skip

    def place(*rows, kind="DRAM"):
        placed = spans.place(Rows.of(np.array(rows, dtype=np.int64), kind))
        return None if placed is None else (placed.rows.address.tolist(), placed.layout is layout)

    assert place((1000, 10, 0, 10, 10), (5040, 10, 0, 10, 1)) == ([1 << 20, (1 << 21) + 40], True)
    assert place((9000, 100, 0)) == ([1 << 22], False)
    for outside in ((999, 1, 0), (1000, 10, 0, 10, 11), (1099, 2, 0), (1100, 1, 0), (20000, 1, 0)):
        assert place(outside) is None
    assert place((1000, 10, 0), (9000, 10, 0)) is None  # of two layouts
    assert place((20000, 100, 0), kind="VRAM") is not None
    assert Spans([]).place(Rows.of(np.array([[1, 1, 0]]), "DRAM")) is None


def test_registered_memory_is_counted_and_joined():
    held = Registered()
    one, two = (Rows.of(np.array(table), "DRAM") for table in ([[100, 50, 3]], [[120, 100, 0], [300, 8, 1]]))
    gpu = Rows.of(np.array([[100, 50, 3]]), "VRAM")
    for rows in (one, two, one, gpu):
        held.add(rows)
    assert held.union() == {("DRAM", 0): [(100, 120), (300, 8)], ("VRAM", 3): [(100, 50)]}
    held.remove(one)
    held.remove(two)
    held.remove(gpu)
    assert held.union() == {("DRAM", 0): [(100, 50)]}
    assert held.version == 7

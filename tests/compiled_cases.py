"""Drawn cases compiled and planned, and their byte moves in an order that can be compared."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan.plan import descriptors
from tests import oracle
from tests.strategies import Case, layout_of


def compiled(case: Case):
    src, dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
    program = kvplan.compile(layout_of(src), layout_of(dst))
    return src, dst, program, program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)


def planned(case: Case) -> kvplan.Plan:
    return compiled(case)[3]


def moves(plan: kvplan.Plan) -> dict[int, int]:
    return oracle.byte_moves(plan.descriptors())


def by_dst(made) -> list[tuple[int, int, int]]:
    return sorted(zip(*(column.tolist() for column in made), strict=True))


def twin_of(plan, max_nbytes=None):
    return descriptors.cut(descriptors.by_sorting(plan.parts), plan.seams, max_nbytes)


def wipe(cache: oracle.Cache, addresses: list[int]) -> None:
    for root in cache.roots:
        start = root.ctypes.data
        inside = [address - start for address in addresses if start <= address < start + root.size]
        root[inside] ^= 0xFF


def assert_same(caches: list[oracle.Cache], expected: list[oracle.Cache]) -> None:
    """Every byte of every cache, guards and padding included."""
    for cache, want in zip(caches, expected, strict=True):
        for root, due in zip(cache.roots, want.roots, strict=True):
            np.testing.assert_array_equal(root, due)

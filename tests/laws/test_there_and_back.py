"""Law 5: a move there and back restores every byte."""

from __future__ import annotations

import numpy as np
from hypothesis import given

import kvplan
from tests import oracle
from tests.catalogue.named_pairs import assert_same, held, transfers
from tests.compiled_cases import compiled, wipe
from tests.profiles import examples
from tests.strategies import cases, layout_of


@given(case=cases(same_heads=True))
@examples(400)
def test_there_and_back_restores(case, executor):
    """Law 5: `compile(a, b)` and then `compile(b, a)` restore `a`."""
    src, _, there, plan = compiled(case)
    before = [root.copy() for root in src.roots]
    executor.submit(plan).synchronize()
    distinct = len(set(case.src_ids)) == len(case.src_ids)
    if not distinct:
        return  # one source in two places has no one way back
    image = sorted(oracle.byte_moves(plan.descriptors()).values())
    wipe(src, image)
    back = kvplan.compile(there.dst, there.src)
    executor.submit(back.plan(case.dst_ids, case.src_ids, case.dst_skip, case.src_skip)).synchronize()
    for got, want in zip(src.roots, before, strict=True):
        np.testing.assert_array_equal(got, want)


@given(case=transfers())
@examples(500)
def test_random_pairs_move_every_byte_there_and_back(case, executor):
    """Laws 1, 2 and 5 for every pair of layouts in the catalogue."""
    device, host = case.device.form().build(case.seed), case.host.form().build(case.seed + 1)
    before, expected = case.device.form().build(case.seed), case.host.form().build(case.seed + 1)
    here, there = layout_of(device).slice(heads=held(case)), layout_of(host)
    to, fro = (case.device_ids, case.device_skip), (case.host_ids, case.host_skip)

    store = kvplan.compile(here, there)
    assert store.unit_tokens == case.unit_tokens
    executor.submit(store.plan(to[0], fro[0], to[1], fro[1])).synchronize()
    oracle.copy(before, expected, to[0], fro[0], to[1], fro[1], case.unit_tokens, case.units)
    assert_same(host, expected)
    assert_same(device, before)

    # Back, into the same blocks of a cache that holds something else.
    other, expected_back = case.device.form().build(case.seed + 2), case.device.form().build(case.seed + 2)
    load = kvplan.compile(there, layout_of(other))
    executor.submit(load.plan(fro[0], to[0], fro[1], to[1])).synchronize()
    oracle.copy(before, expected_back, to[0], to[0], to[1], to[1], case.unit_tokens, case.units)
    assert_same(other, expected_back)

"""KV-cache groups as one plan: own blocks, own ids, own front; memory that they share; nothing to move."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import Groups, KVLayout
from tests import oracle
from tests.profiles import examples
from tests.strategies import cases, layout_of


def cache(layers, tokens, blocks=64, memory=None):
    shape = (len(layers), blocks, 2, tokens, 2, 8)
    return KVLayout.from_tensors(
        "layer block kv token head dim", np.zeros(shape, np.int8) if memory is None else memory, layers=layers
    )


@st.composite
def requests(draw):
    """A group and a request in it: all of its blocks on both sides, and how many source blocks are gone."""
    case = draw(cases(max_blocks=6))
    tokens = case.src.block_tokens, case.dst.block_tokens
    most = min(case.src.sizes["block"] * tokens[0], case.dst.sizes["block"] * tokens[1])
    length = draw(st.integers(0, most // case.unit_tokens)) * case.unit_tokens
    lists = [draw(st.permutations(range(form.sizes["block"])))[: -(-length // n)]
             for form, n in zip((case.src, case.dst), tokens, strict=True)]  # fmt: skip
    return case, lists, draw(st.integers(0, len(lists[0]))), draw(st.booleans())


@examples(100)
@given(drawn=st.lists(requests(), min_size=1, max_size=3))
def test_every_group_moves_its_request_from_its_front_on(drawn, executor):
    programs, sides, firsts, wanted = [], ([], []), ([], []), []
    kept = []
    for case, lists, gone, told in drawn:
        src, dst, expected = case.src.build(case.seed), case.dst.build(case.seed + 1), case.dst.build(case.seed + 1)
        unit = case.unit_tokens
        tokens = src.block_tokens, dst.block_tokens
        start = gone * tokens[0]
        units = min(len(ids) * n for ids, n in zip(lists, tokens, strict=True)) // unit - start // unit
        alive = units > 0
        sides[0].append(lists[0][gone:] if alive else [])
        sides[1].append(lists[1][start // tokens[1] :] if alive else [])
        firsts[0].append(gone)
        firsts[1].append(start // tokens[1] if told else None)
        if alive:
            oracle.copy(src, dst=expected, src_ids=lists[0], dst_ids=lists[1], src_skip=start // unit,
                        dst_skip=start // unit, unit_tokens=unit, units=units)  # fmt: skip
        programs.append(kvplan.compile(layout_of(src), layout_of(dst)))
        wanted.append((dst, expected))
        kept.append(src)
    told = None if None in firsts[1] else firsts[1]
    executor.submit(Groups(programs).plan(*sides, src_first=firsts[0], dst_first=told)).synchronize()
    for dst, expected in wanted:
        for root, want in zip(dst.roots, expected.roots, strict=True):
            np.testing.assert_array_equal(root, want)

"""Law 7: a plan of two lists moves what two plans move."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.plan.layers import even_edges, split_layers
from tests.compiled_cases import by_dst, compiled, moves, planned
from tests.profiles import examples
from tests.ranks.rank_specs import written
from tests.ranks.topologies import reshards, shards_of
from tests.strategies import cases


@given(case=cases())
@examples(400)
def test_a_plan_of_two_lists_moves_what_two_plans_move(case):
    """Law 7: `plan(x + y)` moves what `plan(x)` and `plan(y)` move, joined or not."""
    _, _, program, plan = compiled(case)
    f, g = program.src.block_tokens // program.unit_tokens, program.dst.block_tokens // program.unit_tokens
    if case.src_skip or case.dst_skip or case.units % (f * g):
        return
    blocks = case.units // (f * g) // 2
    first = program.plan(case.src_ids[: blocks * g], case.dst_ids[: blocks * f])
    second = program.plan(case.src_ids[blocks * g :], case.dst_ids[blocks * f :])
    both = kvplan.join([first, second])
    assert both.nbytes == first.nbytes + second.nbytes == plan.nbytes
    assert by_dst(both.descriptors()) == by_dst(plan.descriptors())


@examples(100)
@given(case=reshards(), data=st.data())
def test_a_transfer_in_two_steps_moves_what_one_does(case, data):
    """Law 7 for every pair of ranks: first some whole blocks of the larger side, then the others."""
    programs = kvplan.reshard(*shards_of(case))
    spans = [side[0].span for side in case.sides]
    large = 0 if spans[0] >= spans[1] else 1
    if spans[large] % spans[1 - large] or any(case.skips):
        return
    per_block = spans[large] // spans[1 - large]
    at = data.draw(st.integers(0, len(case.ids[large])))
    cuts = [0, 0]
    cuts[large], cuts[1 - large] = at, min(at * per_block, len(case.ids[1 - large]))
    for program in programs.values():
        whole = written([program.plan(*case.ids)])
        front = program.plan(*(ids[:cut] for ids, cut in zip(case.ids, cuts, strict=True)))
        rest = program.plan(*(ids[cut:] for ids, cut in zip(case.ids, cuts, strict=True)))
        assert written([front, rest]) == whole


@examples(150)
@given(several=st.lists(cases(max_blocks=3), min_size=1, max_size=2), count=st.integers(1, 5))
def test_the_layers_of_a_plan_together_are_the_plan(several, count):
    """Law 7 by layers: the parts of a split plan together move what the plan moves."""
    plan = kvplan.join([planned(case) for case in several])
    made = split_layers(plan, even_edges(len(plan.layers), count))
    assert 1 <= len(made) <= count
    layers = [sorted(layers) for layers, _ in made]
    flat = [layer for some in layers for layer in some]
    assert flat == sorted(set(flat)) == sorted({layer for src, _ in plan.layouts for layer in src.layers})
    together: dict[int, int] = {}
    for _, part in made:
        here = moves(part)
        assert part.nbytes == len(here)
        assert part.direction == plan.direction
        assert len(part.skips) == len(part.parts)
        assert not together.keys() & here.keys()
        together |= here
    assert together == moves(plan)

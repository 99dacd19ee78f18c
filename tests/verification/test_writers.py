"""verify of a set of programs: every byte of the destinations has one writer, or the findings name it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, KVPlanError, LayoutError
from tests.profiles import examples
from tests.ranks.rank_specs import HND, SPLIT, rank, tp
from tests.ranks.topologies import reshards, shards_of

NOTATIONS = ("block layer kv token head dim", "layer: kv block head token dim", "layer head: block token (kv dim)")
TOKENS = st.sampled_from((2, 4, 8))


def cache(notation: str, heads: range, tokens: int, layers: int = 2) -> KVLayout:
    """A cache of 16 tokens in numpy arrays, with rows of 3 bytes."""
    sizes = {"layer": layers, "block": 16 // tokens, "kv": 2, "token": tokens, "head": len(heads), "dim": 3}
    left, _, right = notation.rpartition(":")

    def made(axes):
        if axes:
            return [made(axes[1:]) for _ in range(sizes[axes[0]])]
        dims = right.replace("(kv dim)", "kv_dim").split()
        return np.zeros([sizes.get(dim, 6) for dim in dims], np.uint8)

    return KVLayout.from_tensors(notation, made(left.split()), head_start=heads.start, sizes={})


@st.composite
def sets(draw):
    """Some programs into one pool of five heads, whose block holds several of theirs or a part of one."""
    pool = cache(draw(st.sampled_from(NOTATIONS)), range(5), draw(TOKENS))
    programs = []
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, 4))
        heads = range(first, draw(st.integers(first + 1, 5)))
        programs.append(kvplan.compile(cache(draw(st.sampled_from(NOTATIONS)), heads, draw(TOKENS)), pool))
    return pool, programs


@given(made=sets())
@examples(60)
def test_the_findings_are_those_of_a_count_of_every_byte(made):
    pool, programs = made
    found = kvplan.verify(programs)
    writers: dict[int, list[str]] = {}
    for number, program in enumerate(programs):
        plan = program.plan(range(program.src.num_blocks), range(pool.num_blocks)).descriptors()
        for start, size in zip(plan.dst.tolist(), plan.size.tolist(), strict=True):
            for at in range(start, start + size):
                writers.setdefault(at, []).append(str(number))
    assert found.nbytes == pool.nbytes  # 16 tokens are few enough to look at all of them
    expected = {0: Counter(), 2: Counter()}
    for at in bytes_of(pool):
        count = len(writers.get(at, ()))
        if count != 1:
            expected[min(count, 2)][tuple(writers.get(at, ()))] += 1
    for findings, counts in ((found.unwritten, expected[0]), (found.twice, expected[2])):
        said = Counter()
        for one in findings:
            said[one.programs] += one.nbytes
            row = one.first
            at = pool.address(layer=row.layer, part=row.part, block=row.block, token=row.token, head=row.head)
            assert tuple(writers.get(at, ())) == one.programs
            assert row.head in one.heads
        assert said == counts
    assert found.ok == (not expected[0] and not expected[2])
    assert (found.wrong is None) == found.ok


def bytes_of(layout):
    """The address of every byte of content; rows of these caches are contiguous."""
    for c in layout.components:
        nbytes = np.prod([count for count, _ in c.form.dim])
        for block in range(layout.num_blocks):
            for token in range(layout.block_tokens):
                for head in c.form.heads:
                    start = layout.address(layer=c.layer, part=c.part, block=block, token=token, head=head)
                    yield from range(start, start + int(nbytes))


@given(case=reshards())
@examples(60)
def test_a_resharding_has_one_writer_for_every_byte(case):
    made = kvplan.reshard(*shards_of(case))
    found = kvplan.verify(made)
    assert found.ok, found.wrong
    assert (found.programs, found.destinations) == (len(made), len(case.sides[1]))
    assert found.nbytes > 0


@given(case=reshards(), drawn=st.data())
@examples(40)
def test_without_one_pair_of_a_resharding_its_bytes_are_named(case, drawn):
    made = kvplan.reshard(*shards_of(case))
    left = drawn.draw(st.sampled_from(sorted(made)))
    pairs = [program for key, program in made.items() if key != left]
    if not any(key[1] == left[1] for key in made if key != left):
        return  # no program names this destination any more
    found = kvplan.verify(pairs)
    assert not found.twice
    shares = made[left].shares
    assert {layer for one in found.unwritten for layer in one.layers} <= {n for share in shares for n in share.layers}
    assert {head for one in found.unwritten for head in one.heads} <= {n for share in shares for n in share.heads or ()}
    alone = made[left].src.cp_size == made[left].dst.cp_size == 1 and all(share.turn.ranks == 1 for share in shares)
    assert not (alone and found.ok)  # a replica's turn, and a rank's tokens, may not come in these blocks


def test_two_ranks_described_without_head_start():
    pool = rank(HND, heads=range(4), tokens=16)
    ranks = [rank(SPLIT, heads=range(2)) for _ in range(2)]
    found = kvplan.verify([kvplan.compile(one, pool) for one in ranks])
    half = 8 * 2 * 16 * 2 * 256  # blocks, K and V, tokens, heads, bytes
    assert (found.ok, found.programs, found.destinations, found.nbytes) == (False, 2, 1, 2 * half)
    assert found.wrong == (
        f"{half:,} bytes of destination 0: layer 0, k v, heads 2-3, written by no program; the first is token 0, "
        f"head 2, byte 0 of block 0 of layer 0 k; {half:,} bytes of destination 0: layer 0, k v, heads 0-1, written "
        "by programs 0 and 1; the first is token 0, head 0, byte 0 of block 0 of layer 0 k"
    )


def test_described_rightly_they_fill_the_pool():
    pool = rank(HND, heads=range(4), tokens=64)
    found = kvplan.verify([kvplan.compile(one, pool) for one in tp(SPLIT, 2, 4)])
    assert (found.ok, found.wrong, found.unwritten, found.twice) == (True, None, (), ())


def test_one_program_is_a_set_too():
    program = kvplan.compile(rank(SPLIT, heads=range(1)), rank(HND, heads=range(2)))
    found = kvplan.verify([program])
    assert [one.heads for one in found.unwritten] == [(1,)]
    assert kvplan.verify(program).unwritten == found.unwritten


def test_slices_of_one_pool_are_looked_at_together():
    pool = rank(HND, heads=range(4))
    ranks = [rank(SPLIT, heads=range(2)), rank(SPLIT, heads=range(2, 4))]
    sides = [pool.slice(heads=one.heads) for one in ranks]
    assert kvplan.verify([kvplan.compile(*pair) for pair in zip(ranks, sides, strict=True)]).ok
    twice = kvplan.verify([kvplan.compile(ranks[0], sides[0]), kvplan.compile(ranks[0], pool.slice(heads=range(2)))])
    assert [(one.programs, one.destination) for one in twice.twice] == [(("0", "1"), 0)]  # equal slices are one
    first, whole = kvplan.compile(ranks[0], sides[0]), kvplan.compile(ranks[0], pool)
    found = kvplan.verify([first, whole])
    assert [(one.programs, one.destination) for one in found.twice] == [(("0", "1"), 0), (("0", "1"), 1)]
    assert [(one.heads, one.destination) for one in found.unwritten] == [((2, 3), 1)]


def test_a_resharding_that_is_not_complete():
    made = kvplan.reshard(tp(SPLIT, 4, 8)[:3], rank(HND, heads=range(8)), complete=False)
    found = kvplan.verify(made)
    assert [(one.heads, one.programs) for one in found.unwritten] == [((6, 7), ())]
    assert not found.twice


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "verify of no programs"),
        ([1], r"programs\[0\] is a int; give what kvplan.compile or reshard makes"),
        (7, "verify of a int; give two layouts, a resharding, or a list of programs"),
        ("ab", "verify of a str"),
    ],
)
def test_what_is_no_set_of_programs(given, message):
    with pytest.raises(LayoutError, match=message):
        kvplan.verify(given)


def test_a_layout_needs_a_destination():
    with pytest.raises(LayoutError, match="dst is a NoneType; give the layout to write"):
        kvplan.verify(rank(SPLIT, heads=range(1)))


def test_tensors_are_no_layouts():
    with pytest.raises(LayoutError, match="src is a list; give the layout to read"):
        kvplan.verify([1, 2], rank(SPLIT, heads=range(1)))


def test_a_set_moves_nothing():
    program = kvplan.compile(rank(SPLIT, heads=range(1)), rank(HND, heads=range(2)))
    with pytest.raises(KVPlanError, match="moves nothing; it takes no other argument"):
        kvplan.verify([program], blocks=3)


def test_verify_of_a_pair_says_what_its_program_leaves():
    sides = [cache(NOTATIONS[0], range(heads), 4) for heads in (2, 3)]
    found = kvplan.verify(*sides)
    assert found.ok
    assert [one.heads for one in found.unwritten] == [(2,)]

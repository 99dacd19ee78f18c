"""Heads of a destination that no unit of a program writes: explain and the log say so."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.program.matching import UnwrittenHeads
from tests.profiles import examples

NOTATIONS = ("layer block kv token head dim", "layer head: block token (kv dim)", "kv layer block head token dim")


def cache(heads: range, notation: str = NOTATIONS[0], **told) -> KVLayout:
    axes = {"layer": 2, "block": 4, "token": 8, "head": len(heads), "dim": 16}
    return KVLayout.from_spec({"notation": notation, "sizes": axes, "head_start": heads.start, "dtype": "bf16", **told})


SEVEN = st.tuples(st.integers(0, 6), st.integers(1, 7)).filter(lambda one: one[0] < one[1]).map(lambda one: range(*one))


@given(held=SEVEN, sent=SEVEN, notations=st.tuples(*[st.sampled_from(NOTATIONS)] * 2))
@examples(100)
def test_they_are_the_heads_that_only_the_destination_holds(held, sent, notations):
    if not set(held) & set(sent):
        return
    program = kvplan.compile(cache(sent, notations[0]), cache(held, notations[1]))
    left = tuple(sorted(set(held) - set(sent)))
    said = [one.heads for one in program.unwritten]
    assert said == ([left] if left else [])
    assert all(one.whole and one.held == len(held) for one in program.unwritten)
    assert ("never written" in program.explain()) == bool(left)


def test_in_words():
    program = kvplan.compile(cache(range(2)), cache(range(8)))
    told = "6 of 8 heads of the destination (2-7) are never written by this program"
    assert [str(one) for one in program.unwritten] == [told]
    before, _, _ = program.explain().partition("2 refine")
    assert told in before
    one = UnwrittenHeads((0, 1, 3), ("k",), (7,), 8, whole=False)
    assert str(one) == "1 of 8 heads of the destination (7), in layers 0-1 3, parts k, is never written by this program"


def test_parts_that_differ_are_told_apart():
    sizes = {"layer": 2, "block": 4, "token": 8, "dim": 4}
    scales = {"notation": "layer block token head dim", "part": "scale", "dtype": "fp32"}
    rank, pool = (
        KVLayout.merge([cache(heads), KVLayout.from_spec({**scales, "address": 1 << 20, "sizes": sizes | {"head": 2}})])
        for heads in (range(2), range(4))
    )
    (found,) = kvplan.compile(rank, pool).unwritten
    assert (found.parts, found.heads, found.held, found.whole) == (("k", "v"), (2, 3), 4, False)


def logged(caplog):
    return [record for record in caplog.records if record.name == "kvplan.plan"]


def test_the_log_tells_it_once_a_program(caplog):
    rank, pool = cache(range(2, 4)), cache(range(4))
    with caplog.at_level(logging.INFO):
        program = kvplan.compile(rank, pool)
        assert kvplan.compile(rank, pool) is program
    (record,) = logged(caplog)
    assert record.levelno == logging.WARNING
    assert record.kvplan_heads == (0, 1)
    assert "2 of 4 heads of the destination (0-1) are never written" in record.getMessage()
    assert "dst.slice(heads=...)" in record.getMessage()


@pytest.mark.parametrize("quiet", ["slice", "load", "reshard"])
def test_nothing_is_logged_where_it_is_meant_or_told_otherwise(caplog, quiet):
    rank, pool = cache(range(2, 4)), cache(range(4))
    with caplog.at_level(logging.INFO):
        if quiet == "slice":
            kvplan.compile(rank, pool.slice(heads=rank.heads))
        elif quiet == "load":
            kvplan.compile(pool, rank)
        else:
            kvplan.reshard([cache(range(2)), rank], pool)
    assert not logged(caplog)


def test_programs_of_layers_plan_and_move_these_layers():
    program = kvplan.compile(cache(range(4)), cache(range(4), NOTATIONS[2]))
    part = program.of_layers([1])
    assert part is program.of_layers((1,))
    assert part.src.layers == part.dst.layers == (1,)
    assert part.plan([0, 1], [2, 3]).nbytes * 2 == program.plan([0, 1], [2, 3]).nbytes
    with pytest.raises(kvplan.LayoutError):
        program.of_layers((2,))
    with pytest.raises(kvplan.LayoutError):
        program.of_layers(())

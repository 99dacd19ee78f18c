"""Transfers at scale: the counts are those of kvplan's own plans, and the table of the manual is what is printed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvplan import LayoutError
from kvplan.catalogue.models import find_model, models
from kvplan.cost.wires.scale import (
    CHANGES,
    ENGINES,
    Change,
    Ranks,
    changes_of,
    engine_of,
    groups_of,
    prefills_of,
    scattered,
)
from kvplan.cost.wires.wire_store import PUBLISHED, published
from tests.commands import ROOT, answer, document

VLLM, SGLANG = ENGINES


def one(model, change, tokens=4096, engine=VLLM):
    (found,) = prefills_of(find_model(model), change, [tokens], engine)
    return found


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "glm-5", "gpt-oss-20b"])
def test_every_byte_that_decode_needs_is_received_once(model, engine):
    known, tokens = find_model(model), 4096
    for change in changes_of(known):
        (found,) = prefills_of(known, change, [tokens], engine)
        rows = dict(engine.block_tokens)
        expected = 0
        for group in groups_of(known):
            dim, dtype = group.stored_as("bf16")
            row = dim * (1 if dtype == "uint8" else 2) * (2 if group.kind == "mha" else 1)
            heads = len(group.rank_heads(change.decode.tp)) if group.kind == "mha" else 1
            held = group.rows_held(tokens, rows[group.kind]) * heads * row * len(group.layers)
            expected += held * change.decode.number // change.decode.cp // change.decode.pp
        assert sum(rank.nbytes for rank in found.receivers) == expected
        assert sum(rank.nbytes for rank in found.senders) == expected
        assert sum(rank.pairs for rank in found.receivers) == sum(rank.pairs for rank in found.senders)


def test_descriptors_by_hand():
    # 4,096 tokens in 256 pages, 32 layers; K and V of a head's row lie side by side.
    assert one("llama-3.1-8b", CHANGES[0]).busiest.descriptors == 256 * 32
    assert one("llama-3.1-8b", CHANGES[0]).busiest.descriptor_nbytes == 2 * 16 * 2 * 128 * 2
    # In SGLang's pool each token has its heads side by side: one row of each rank's heads, for K and for V.
    found = one("llama-3.1-8b", Change(Ranks(8), Ranks(4)), engine=SGLANG).busiest
    assert (found.descriptors, found.descriptor_nbytes, found.pairs) == (4096 * 32 * 2 * 2, 256, 2)
    # Dealt tokens of MLA: a row of 576 elements each.
    found = one("deepseek-v3", Change(Ranks(8), Ranks(8, cp=8))).busiest
    assert (found.descriptors, found.descriptor_nbytes) == (4096 // 8 * 61, 1152)


def test_two_lengths_are_planned_as_one_each():
    both = prefills_of(find_model("llama-3.1-8b"), CHANGES[1], [2048, 4096], VLLM)
    assert [found.busiest.nbytes for found in both] == [one("llama-3.1-8b", CHANGES[1], n).busiest.nbytes
                                                        for n in (2048, 4096)]  # fmt: skip
    assert both[1].busiest.descriptors == 2 * both[0].busiest.descriptors


def test_stages_share_the_layers():
    found = one("llama-3.1-8b", Change(Ranks(2, pp=2), Ranks(2)))
    assert len(found.senders) == 4
    assert len({rank.nbytes for rank in found.senders}) == 1
    assert found.receivers[0].pairs == 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_rank_is_faster_than_its_nic(name):
    wire = published(name)
    for change in CHANGES:
        found = one("llama-3.1-70b", change, 8192)
        least = max(rank.nbytes for rank in (*found.receivers, *found.senders)) * wire.byte
        assert found.packed(wire) > least
        assert found.direct(wire) > least
        assert found.packed(wire) < least * 1.25 + wire.start
        assert found.messages(wire) <= max(found.receivers).nbytes // (8 << 20) + max(found.receivers).pairs


def test_changes_fit_the_heads():
    assert all(changes_of(model) for model in models().values())
    assert str(changes_of(find_model("qwen3-30b-a3b"))[-1]) == "TP 8 to TP 8 DCP 2"
    assert all(change.decode.cp == 1 for change in changes_of(find_model("gpt-oss-20b")))
    with pytest.raises(LayoutError, match="neither divides"):
        prefills_of(find_model("phi-3-medium"), Change(Ranks(4), Ranks(4)), [1024], VLLM)
    with pytest.raises(LayoutError, match="engine is 'other'; there are vllm, sglang"):
        engine_of("other")


@pytest.mark.parametrize(("count", "pool"), [(1, 2), (4, 8), (100, 200), (4096, 8192), (77, 1000)])
def test_scattered_blocks_are_different_and_no_neighbours(count, pool):
    ids = scattered(count, pool)
    assert len(set(ids.tolist())) == count
    assert ids.min() >= 0
    assert ids.max() < pool
    if count > 4:
        assert (np.abs(np.diff(ids)) > 1).all()


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_document(capsys):
    found = document(capsys, "wires", "--model", "deepseek-v3", "--tokens", "1k,2k")
    assert [wire["wire"].rpartition(", ")[2] for wire in found["wires"]] == list(PUBLISHED)
    assert {row["tokens"] for row in found["transfers"]} == {1024, 2048}
    assert {row["engine"] for row in found["transfers"]} == {"any"}
    for row in found["transfers"]:
        assert len(row["direct_seconds"]) == len(row["packed_seconds"]) == 4
        assert row["descriptors"] * row["descriptor_nbytes"] == pytest.approx(row["nbytes"], rel=0.01)
        assert all(map(math.isfinite, row["direct_seconds"]))


def test_one_wire_and_one_engine(capsys):
    shown = answer(capsys, "wires", "--model", "llama-3.1-8b", "--engine", "sglang", "--wire", "push", "--tokens", "1k")
    assert "layouts of sglang" in shown
    assert "layouts of vllm" not in shown
    assert "2.43 us a descriptor" in shown


@pytest.mark.slow
def test_the_page_is_what_the_command_prints(capsys):
    page = (ROOT / "docs" / "processes" / "wires.md").read_text(encoding="utf-8")
    assert answer(capsys, "wires", "--markdown") == page, "run: kvplan wires --markdown > docs/processes/wires.md"

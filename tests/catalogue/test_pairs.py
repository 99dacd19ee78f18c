"""All pairs: any device layout of the catalogue against any host layout of the same cache; bytes, and the table."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given

import kvplan
from kvplan.catalogue.layouts import layout_for
from kvplan.catalogue.models import Group
from kvplan.cli import main
from kvplan.cli.answers.pair_facts import REFERENCES, mixed_kinds, pairs_facts
from tests.catalogue.named_pairs import KINDS, LAYOUTS, named, transfers
from tests.commands import ROOT, answer, document
from tests.profiles import examples
from tests.strategies import layout_of

MANUAL = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


def test_both_kinds_have_both_sides():
    assert {(layout.side, layout.kind) for layout in LAYOUTS} >= {(s, k) for s in ("device", "host") for k in KINDS}


# ---- bytes -------------------------------------------------------------------------------------------------------


@given(case=transfers())
@examples(200)
def test_the_catalogue_lays_out_what_real_arrays_have(case):
    for side in (case.device, case.host):
        real, virtual = layout_of(side.form().build(0)), side.virtual()
        if "head" in real.sizes:
            real = real.slice(heads=side.heads)
        assert [(c.layer, c.part, c.form) for c in virtual.components] == [
            (c.layer, c.part, c.form) for c in real.components
        ]
        if not virtual.notation.partition(":")[2]:  # one tensor: its components lie as far apart
            first = (virtual.components[0].address, real.components[0].address)
            assert [c.address - first[0] for c in virtual.components] == [c.address - first[1] for c in real.components]


# ---- numbers -----------------------------------------------------------------------------------------------------

WHOLE_BLOCK = (1, 1_310_720, 1_310_720)
ROWS = [
    # §4 of the project's table of layouts: device, host, whole model?, runs a block, bytes a run, host extents
    ("vllm-split-kv", "page-first", 4, 160, 8_192, WHOLE_BLOCK),
    ("vllm-blocks-first", "page-first", 4, 80, 16_384, WHOLE_BLOCK),
    ("cross-layer", "page-first", 4, 1, 1_310_720, WHOLE_BLOCK),
    ("vllm-LBHNC", "page-first", 4, 5_120, 256, WHOLE_BLOCK),
    ("vllm-split-kv", "sglang-page-first", 4, 2_560, 512, (2, 655_360, 655_360)),
    ("vllm-split-kv", "page-first", 1, 2_560, 512, (2_560, 512, 512)),
    ("flashinfer-tuple-HND", "page-first-HND", 1, 160, 8_192, (160, 8_192, 8_192)),
]


@pytest.fixture(scope="module")
def all_pairs():
    return pairs_facts()


@pytest.mark.slow
@pytest.mark.parametrize(("device", "host", "tp", "runs", "nbytes", "extents"), ROWS)
def test_rows_known_by_hand(all_pairs, device, host, tp, runs, nbytes, extents):
    (pair,) = (
        pair for pair in all_pairs["pairs"]
        if (pair["device"], pair["host"], pair["host_tp"], pair["host_block_tokens"]) == (device, host, tp, 16)
    )  # fmt: skip
    assert (pair["runs"], pair["run_nbytes"], pair["unit_nbytes"]) == (runs, [nbytes, nbytes], 1_310_720)
    assert tuple(pair["host_extents"].values()) == extents


def test_every_pair_is_there_and_none_is_refused(all_pairs):
    found = {(pair["device"], pair["host"]) for pair in all_pairs["pairs"]}
    assert found == {(d.name, h.name) for kind in KINDS for d in named("device", kind) for h in named("host", kind)}
    assert not [pair for pair in all_pairs["pairs"] if pair["refused"]]
    for pair in all_pairs["pairs"]:
        low, high = pair["run_nbytes"]
        assert pair["runs"] * low <= pair["unit_nbytes"] <= pair["runs"] * high
        assert low % pair["alignment"] == 0


@pytest.mark.parametrize("host", [layout for layout in LAYOUTS if layout.side == "host"], ids=lambda one: one.name)
def test_a_cache_of_another_kind_is_refused_by_what_it_holds(host):
    """Equal layers, blocks and dtype: only the content differs."""
    for device in [layout for layout in LAYOUTS if layout.side == "device" and layout.kind != host.kind]:
        sides = [
            layout_for(
                side, Group("full", side.kind, tuple(range(4)), heads=2 if side.kind == "mha" else 1, dim=64),
                num_blocks=8, block_tokens=16, dtype="bf16",
            )
            for side in (device, host)
        ]  # fmt: skip
        for pair in (sides, sides[::-1]):
            with pytest.raises(
                kvplan.IncompatibleLayoutsError, match=r"'kv' of 128 bytes .* is not 'k' of 128 and 'v'"
            ):
                kvplan.compile(*pair)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_latent_of_as_many_bytes_as_k_and_v_is_refused(heads):
    mha, mla = (
        kvplan.KVLayout.from_spec({"notation": notation, "sizes": sizes | {"layer": 2, "block": 4, "token": 16}})
        for notation, sizes in (
            ("layer: block kv token head dim", {"head": heads, "dim": 64}), ("layer: block token dim", {"dim": 128}),
        )
    )  # fmt: skip
    with pytest.raises(kvplan.IncompatibleLayoutsError, match="only one of them has a head axis"):
        kvplan.compile(mha, mla)


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_document_is_what_the_command_prints(capsys):
    assert answer(capsys, "pairs", "--markdown") == (ROOT / "docs" / "reference" / "pairs.md").read_text(
        encoding="utf-8"
    )


def test_the_document_names_every_layout_and_the_refusal():
    text = (ROOT / "docs" / "reference" / "pairs.md").read_text(encoding="utf-8")
    assert not [layout.name for layout in LAYOUTS if layout.kind in KINDS and layout.name not in text]
    assert all(reference.name in text for reference in REFERENCES)
    assert mixed_kinds() in text


def test_one_pair_reads_as_the_manual_shows(capsys):
    command, shown = re.search(r"```console\n\$ kvplan (pairs [^\n]*)\n(.*?)```", MANUAL, flags=re.DOTALL).groups()
    assert answer(capsys, *shlex.split(command)) == shown


@pytest.mark.slow
def test_every_screen_has_80_columns(capsys):
    assert max(map(len, answer(capsys, "pairs").splitlines())) <= 80


def test_json_is_documented(capsys):
    facts = document(capsys, "pairs", "--device", "vllm-LBHNC", "--host", "lmcache")
    assert facts["schema"] == "kvplan.pairs/1"
    assert [layout["name"] for layout in facts["layouts"]] == ["vllm-LBHNC", "lmcache"]
    assert len(facts["pairs"]) == 4
    section = MANUAL.partition("\n`kvplan.pairs/1`")[2].partition("\n`kvplan.")[0]
    keys = {*facts, *facts["models"][0], *facts["layouts"][0], *facts["pairs"][0]} - {"schema"}
    assert not [key for key in keys if f"`{key}`" not in section]


def test_a_pair_of_two_kinds_is_a_finding(capsys):
    reason = (
        "'mla' holds one latent row a token and 'page-first' K and V of each head: these are different caches, "
        "and each lacks the parts of the other"
    )
    assert main(["pairs", "--device", "mla", "--host", "page-first", "--json"]) == 1
    out, err = capsys.readouterr()
    assert (err, reason in out) == (f"kvplan: {reason}\n", True)


@pytest.mark.parametrize(("option", "name"), [("--device", "page-first"), ("--host", "nowhere")])
def test_names_that_are_no_layout(capsys, option, name):
    assert main(["pairs", option, name]) == 2
    assert (
        f"kvplan: {option} {name!r} is not a {option[2:]} layout of the catalogue; it has " in capsys.readouterr().err
    )

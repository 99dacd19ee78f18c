"""All pairs: any device layout of the catalogue against any host layout of the same cache; bytes, and the table."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvplan
from kvplan.catalogue.layouts import NamedLayout, layout_for, named_layouts
from kvplan.catalogue.models import Group
from kvplan.cli import main
from kvplan.cli.answers.pair_facts import REFERENCES, mixed_kinds, pairs_facts
from tests import oracle
from tests.commands import ROOT, answer, document
from tests.strategies import Form, id_lists, layout_of

LAYOUTS = list(named_layouts().values())
KINDS = ("mha", "mla")
MANUAL = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
DTYPES = {1: "fp8", 2: "bf16", 4: "fp32"}


def named(side: str, kind: str) -> list[NamedLayout]:
    return [layout for layout in LAYOUTS if (layout.side, layout.kind) == (side, kind)]


def test_both_kinds_have_both_sides():
    assert {(layout.side, layout.kind) for layout in LAYOUTS} >= {(s, k) for s in ("device", "host") for k in KINDS}


# ---- bytes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A layout of the catalogue, and what one rank holds in it."""

    layout: NamedLayout
    group: Group
    num_blocks: int
    block_tokens: int
    tp: int
    rank: int
    itemsize: int
    separate: bool  # whether nested tensors are allocations of their own

    @property
    def heads(self) -> range:
        """Heads of this rank; a rank of more ranks than heads has one, with others."""
        each = max(self.group.heads // self.tp, 1)
        first = self.rank * self.group.heads // self.tp
        return range(first, first + each)

    def form(self) -> Form:
        """It as plain memory: C order, no padding, whatever all ranks share laid out whole."""
        shared = "tp" in self.layout.split.values()
        heads = range(self.group.heads) if shared else self.heads
        extents = {
            "layer": len(self.group.layers), "kv": 2, "block": self.num_blocks, "token": self.block_tokens,
            "head": len(heads), "dim": self.group.dim,
        }  # fmt: skip
        nesting, dims = oracle.split_notation(self.layout.notation)
        atoms = {*nesting, *(atom for dim in dims for atom in dim)}
        sizes = {axis: extents[axis] for axis in extents if axis in {atom.partition(".")[0] for atom in atoms}}
        for factor, told in self.layout.split.items():
            axis, _, number = factor.partition(".")
            size = min(self.tp, self.group.heads) if told == "tp" else int(told)
            sizes |= {factor: size, f"{axis}.{1 - int(number)}": sizes[axis] // size}
        rank = len(dims)
        return Form(
            notation=self.layout.notation, sizes=sizes, order=tuple(range(rank)), before=(0,) * rank, after=(0,) * rank,
            shared=not self.separate, head_start=heads.start, layer_start=self.group.layers[0], itemsize=self.itemsize,
        )  # fmt: skip

    def virtual(self) -> kvplan.KVLayout:
        """It as the catalogue lays it out."""
        return layout_for(
            self.layout, self.group, num_blocks=self.num_blocks, block_tokens=self.block_tokens,
            dtype=DTYPES[self.itemsize], tp=self.tp, rank=self.rank,
        )  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    device: Side
    host: Side
    unit_tokens: int
    units: int
    device_ids: list[int]
    host_ids: list[int]
    device_skip: int
    host_skip: int
    seed: int


BLOCK_TOKENS = ((1, 1), (2, 2), (4, 2), (2, 4), (1, 3), (3, 1), (6, 4), (2, 8), (4, 1), (4, 6))  # 1 to 4 units a block


@st.composite
def transfers(draw) -> Transfer:
    kind = draw(st.sampled_from(KINDS))
    heads = draw(st.integers(1, 4)) if kind == "mha" else 1
    start, layers = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    device = draw(st.sampled_from(named("device", kind)))
    host = draw(st.sampled_from(named("host", kind)))
    whole = max(int(size) for side in (device, host) for size in (*side.split.values(), 1) if size != "tp")
    group = Group("full", kind, tuple(range(start, start + layers)), heads=heads, dim=whole * draw(st.integers(1, 3)))
    tp = draw(st.sampled_from([n for n in range(1, 5) if heads % n == 0 or n % heads == 0]))
    rank = draw(st.integers(0, tp - 1))
    itemsize = draw(st.sampled_from((1, 2, 4)))
    shares = draw(st.booleans())  # whether the host pool is of this rank, or of the whole model
    device_tokens, host_tokens = draw(st.sampled_from(BLOCK_TOKENS))
    device_blocks, host_blocks = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    src = Side(device, group, device_blocks, device_tokens, tp, rank, itemsize, draw(st.booleans()))
    dst = Side(
        host, group, host_blocks, host_tokens, tp if shares else 1, rank if shares else 0, itemsize, separate=False
    )
    unit = gcd(device_tokens, host_tokens)
    f, g = device_tokens // unit, host_tokens // unit
    device_skip, host_skip = draw(st.integers(0, f - 1)), draw(st.integers(0, g - 1))
    units = draw(st.integers(1, min(device_blocks * f - device_skip, host_blocks * g - host_skip)))
    device_ids = draw(id_lists(device_blocks, -(-(units + device_skip) // f), distinct=True))
    host_ids = draw(id_lists(host_blocks, -(-(units + host_skip) // g), distinct=True))
    # Ids say no more than this: one side's last block is used to its end.
    units = min(len(device_ids) * f - device_skip, len(host_ids) * g - host_skip)
    return Transfer(src, dst, unit, units, device_ids, host_ids, device_skip, host_skip, draw(st.integers(0, 2**31)))


@given(case=transfers())
@settings(max_examples=max(500, settings.default.max_examples))
def test_random_pairs_move_every_byte_there_and_back(case, executor):
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


@given(case=transfers())
@settings(max_examples=200)
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


def held(case: Transfer) -> range | None:
    return case.device.heads if case.device.group.kind == "mha" else None


def assert_same(cache: oracle.Cache, expected: oracle.Cache) -> None:
    for got, want in zip(cache.roots, expected.roots, strict=True):
        np.testing.assert_array_equal(got, want)


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


def test_the_document_is_what_the_command_prints(capsys):
    assert answer(capsys, "pairs", "--markdown") == (ROOT / "docs" / "pairs.md").read_text(encoding="utf-8")


def test_the_document_names_every_layout_and_the_refusal():
    text = (ROOT / "docs" / "pairs.md").read_text(encoding="utf-8")
    assert not [layout.name for layout in LAYOUTS if layout.kind in KINDS and layout.name not in text]
    assert all(reference.name in text for reference in REFERENCES)
    assert mixed_kinds() in text


def test_one_pair_reads_as_the_manual_shows(capsys):
    command, shown = re.search(r"```console\n\$ kvplan (pairs [^\n]*)\n(.*?)```", MANUAL, flags=re.DOTALL).groups()
    assert answer(capsys, *shlex.split(command)) == shown


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
    assert f"kvplan: {option} {name!r} is not a {option[2:]} layout of the catalogue; it has " in capsys.readouterr().err

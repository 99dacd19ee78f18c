"""All pairs: any device layout of the catalogue against any host layout of the same cache; bytes, and the table."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from hypothesis import given

from tests.catalogue.named_pairs import KINDS, named, transfers
from tests.commands import ROOT, answer, python
from tests.profiles import examples
from tests.strategies import layout_of

MANUAL = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


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


@pytest.fixture(scope="module")
def all_pairs():
    return json.loads(python("-m", "kvplan", "pairs", "--json").stdout)


def test_every_pair_is_there_and_none_is_refused(all_pairs):
    found = {(pair["device"], pair["host"]) for pair in all_pairs["pairs"]}
    assert found == {(d.name, h.name) for kind in KINDS for d in named("device", kind) for h in named("host", kind)}
    assert not [pair for pair in all_pairs["pairs"] if pair["refused"]]
    for pair in all_pairs["pairs"]:
        low, high = pair["run_nbytes"]
        assert pair["runs"] * low <= pair["unit_nbytes"] <= pair["runs"] * high
        assert low % pair["alignment"] == 0


# ---- the command -------------------------------------------------------------------------------------------------


def test_one_pair_reads_as_the_manual_shows(capsys):
    command, shown = re.search(r"```console\n\$ kvplan (pairs [^\n]*)\n(.*?)```", MANUAL, flags=re.DOTALL).groups()
    assert answer(capsys, *shlex.split(command)) == shown

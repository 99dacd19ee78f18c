"""What `kvplan inspect --model --peer nixl` answers: descriptors of a prompt, and pieces if it is packed."""

from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator

from kvplan.cli.screen import schema_of
from tests.commands import answer, document

LLAMA = ("inspect", "--model", "llama-3.1-70b", "--tp", "4")


def test_by_nixl_to_another_machine(capsys):
    # The same unit of 5,120 runs: 2,048 units of 32k tokens that do not touch have a descriptor for each run.
    options = "--tokens", "32k", "--peer", "nixl", "--peer-layout", "flashinfer"
    facts = document(capsys, *LLAMA, *options)
    (context,) = facts["contexts"]
    assert context["peer"]["descriptors"] == 2_048 * 5_120
    assert context["peer"]["descriptor_nbytes"] == 256
    least = context["nbytes"] / context["peer"]["piece_nbytes"]
    assert least <= context["peer"]["pieces"] <= 1.1 * least + 1
    assert facts["peer"] == {"layout": "flashinfer-NHD", "notation": "layer: block kv token head dim",
                             "block_tokens": 16, "link": "NIXL"}  # fmt: skip
    text = answer(capsys, *LLAMA, *options)
    assert "32,768   10,485,760          256 bytes      82        32 MiB" in text


def test_blocks_of_other_sizes_are_cut_for_nixl(capsys):
    """A unit is the smaller block of both sides; 500 tokens fill the last larger block in part."""
    for near, far in ((16, 64), (64, 16)):
        facts = document(capsys, *LLAMA, "--block-tokens", str(near), "--tokens", "500", "--peer", "nixl",
                         "--peer-block-tokens", str(far))  # fmt: skip
        (context,), (group,) = facts["contexts"], facts["groups"]
        units = context["nbytes"] // group["peer"]["unit_nbytes"]
        assert group["peer"]["unit_tokens"] == 16
        assert context["peer"]["descriptors"] == units * group["peer"]["runs"]


@pytest.mark.parametrize("model", ["jamba-v0.1", "gpt-oss-20b", "deepseek-v3"])
def test_groups_and_states_are_of_one_prompt(capsys, model):
    facts = document(capsys, "inspect", "--model", model, "--peer", "nixl", "--tokens", "1k", "--no-advice")
    Draft202012Validator(schema_of("inspect-model")).validate(facts)
    (context,) = facts["contexts"]
    assert context["peer"]["descriptors"] == sum(
        group["peer"]["runs"] * max((group["window"] or 1024) // group["peer"]["unit_tokens"], 1)
        if group["kind"] != "state" else group["peer"]["runs"] for group in facts["groups"]
    )  # fmt: skip

"""What `kvplan inspect --model` answers, its numbers computed by hand."""

from __future__ import annotations

import re
import shlex

import pytest

from kvplan.catalogue.models import models
from tests.commands import ROOT, answer, document

LLAMA = ("inspect", "--model", "llama-3.1-70b", "--tp", "4")


@pytest.mark.parametrize(
    ("engine", "host", "runs", "nbytes"),
    [
        ("vllm", "page-first", 5120, 256),  # HND against NHD: a row of one head
        ("vllm", "vllm-host", 80, 16_384),  # a page a layer on both sides
        ("vllm", "page-first-HND", 5120, 256),  # K and V interleave in the content of the one, not of the other
        ("sglang", "page-first", 160, 8192),
        ("sglang", "sglang-page-first", 2560, 512),  # a row of two heads
        ("flashinfer", "page-first", 80, 16_384),
        ("tensorrt-llm", "page-first-HND", 1, 1_310_720),
        ("transformers", "page-first", 1, 1_310_720),
        ("cross-layer", "block layer kv token head dim", 1, 1_310_720),
        ("layer: block kv token head dim", "lmcache", 160, 8192),
    ],
)
def test_engines_and_hosts(capsys, engine, host, runs, nbytes):
    (group,) = document(capsys, *LLAMA, "--engine", engine, "--host", host)["groups"]
    assert (group["runs"], group["run_nbytes"], group["unit_nbytes"]) == (runs, [nbytes, nbytes], 1_310_720)


@pytest.mark.parametrize("name", models())
def test_every_model_fits_80_columns(capsys, name):
    assert max(map(len, answer(capsys, "inspect", f"--model={name}").splitlines())) <= 80


def test_the_manual_shows_what_is_printed(capsys):
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    command, shown = re.search(r"```console\n\$ kvplan (inspect --model [^\n]*)\n(.*?)```", text, re.DOTALL).groups()
    assert answer(capsys, *shlex.split(command)) == shown

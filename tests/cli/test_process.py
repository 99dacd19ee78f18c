"""The command line as a process: what it loads, and a reader that leaves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.commands import BLOCKED, GPU, HOST, ROOT, python

pytestmark = [pytest.mark.slow, pytest.mark.slow]


# What takes a tenth of a second or more to load, and of the standard library what takes more than a hundredth.
HEAVY = ["torch", "triton", "cuda", "numba", "llvmlite", "matplotlib", "http", "xml", "ssl"]


@pytest.mark.parametrize(
    ("argv", "blocked"),
    [
        (["inspect", GPU], HEAVY),
        (["inspect", GPU, "--json"], [*HEAVY, "rich"]),
        (["inspect", "--model", "llama-3.1-70b"], HEAVY),
        (["which", "16@0x7f0000002000", GPU], HEAVY),
        (["explain", GPU, HOST], HEAVY),
        (["explain", HOST, GPU, "--blocks", "0-15", "--json"], [*HEAVY, "rich"]),
        (["report", HOST, GPU, "--blocks", "0-15", "--output", "{folder}/report.html"], [*HEAVY, "rich"]),
        (["backends", "--json"], [*HEAVY, "rich", "transformers"]),
        (["demo", "--help"], [*HEAVY, "rich", "transformers"]),
        (["pairs", "--device", "vllm-LBHNC", "--host", "page-first"], HEAVY),
        (["--help"], [*HEAVY, "rich"]),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1"], HEAVY),
    ],
    ids=lambda value: " ".join(value[:1]),
)
def test_commands_start_light(argv, blocked, tmp_path):
    argv = [given.replace("{folder}", str(tmp_path)) for given in argv]
    done = python("-c", BLOCKED.format(blocked=blocked, argv=argv))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_reader_that_has_seen_enough():
    read, write = os.pipe()
    os.close(read)
    argv = [
        sys.executable,
        "-m",
        "kvplan",
        "plan",
        GPU,
        HOST,
        "--src",
        "0-99",
        "--dst",
        "0-99",
        "--limit",
        "all",
        "--json",
    ]
    try:
        done = subprocess.run(argv, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")

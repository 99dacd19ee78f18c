"""The command line as a process: what it loads, readers that leave, a full disk, an interrupt, no rich."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan.cli import catalogue, main
from tests.commands import BLOCKED, GPU, HOST, ROOT, fails, python
from tests.patience import PATIENCE

# What takes a tenth of a second or more to load, and of the standard library what takes more than a hundredth.
HEAVY = ["torch", "triton", "cuda", "numba", "llvmlite", "matplotlib", "http", "xml", "ssl"]


def process(*argv, shell=(), **streams):
    command = [*shell, sys.executable, "-m", "kvplan", *argv]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=PATIENCE, stderr=subprocess.PIPE, **streams)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "blocked"),
    [
        (["inspect", GPU], HEAVY),
        (["inspect", GPU, "--json"], [*HEAVY, "rich"]),
        (["inspect", "--model", "llama-3.1-70b"], HEAVY),
        (["which", "16@0x7f0000002000", GPU], HEAVY),
        (["explain", HOST, GPU, "--blocks", "0-15", "--json"], [*HEAVY, "rich"]),
        (["report", HOST, GPU, "--blocks", "0-15", "--output", "{folder}/report.html"], [*HEAVY, "rich"]),
        (["backends", "--json"], [*HEAVY, "rich", "transformers"]),
        (["demo", "--help"], [*HEAVY, "rich", "transformers"]),
        (["pairs", "--device", "vllm-LBHNC", "--host", "page-first"], HEAVY),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1"], HEAVY),
    ],
    ids=lambda value: " ".join(value[:1]),
)
def test_commands_start_light(argv, blocked, tmp_path):
    argv = [argument.replace("{folder}", str(tmp_path)) for argument in argv]
    done = python("-c", BLOCKED.format(blocked=blocked, argv=argv))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.slow
def test_a_reader_that_has_seen_enough():
    read, write = os.pipe()
    os.close(read)
    try:
        done = process("plan", GPU, HOST, "--src", "0-99", "--dst", "0-99", "--limit", "all", "--json", stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize("argv", [("inspect", GPU), ("explain", GPU, HOST, "--json"), ("--help",)], ids=" ".join)
def test_a_full_disk_and_closed_streams(argv):
    with Path("/dev/full").open("w") as full:
        done = process(*argv, stdout=full)
    assert done.returncode == 2
    assert done.stderr == b"kvplan: cannot write: No space left on device; is the disk full?\n"
    closed = process(*argv, shell=("sh", "-c", '"$@" >&-', "sh"))  # a shell closes what Python always opens
    assert (closed.returncode, b"Traceback" in closed.stderr) == (0, False)


def test_an_interrupt_is_one_line(capsys, monkeypatch):
    def interrupted(args, tell):
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "run_inspect", interrupted)
    assert fails(capsys, "inspect", GPU, code=130) == "interrupted"


def test_without_rich(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert fails(capsys, "inspect", GPU) == "needs rich; pip install rich"
    assert main(["inspect", GPU, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)

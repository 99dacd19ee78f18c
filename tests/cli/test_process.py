"""The command line as a process: what it loads, its streams, its help."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys

import pytest

import kvplan
from kvplan.cli import main
from kvplan.cli.main import COMMANDS
from tests.commands import BLOCKED, GPU, HOST, ROOT, python

pytestmark = [pytest.mark.slow, pytest.mark.slow]


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvplan {kvplan.__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^    {command}\s", out, re.MULTILINE) for command in COMMANDS)


def test_python_dash_m(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvplan", "inspect", GPU, "--json"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "kvplan" / "__main__.py"), run_name="__main__")
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "kvplan.inspect/1"
    done = python("-m", "kvplan", "inspect", "nowhere.toml")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


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


def test_a_terminal_without_unicode():
    done = python("-m", "kvplan", "inspect", GPU, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_no_color():
    assert "\x1b[36m" in python("-m", "kvplan", "inspect", GPU, FORCE_COLOR="1", TERM="xterm").stdout
    plain = python("-m", "kvplan", "inspect", GPU, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm").stdout
    assert "\x1b[3" not in plain
    assert "\x1b" not in python("-m", "kvplan", "inspect", GPU).stdout

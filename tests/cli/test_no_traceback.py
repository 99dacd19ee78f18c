"""Odd input to every command: one line with a hint, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan.cli import main
from kvplan.cli.main import COMMANDS
from tests.commands import GPU, HOST, ROOT
from tests.patience import PATIENCE

SPECS_OF = {
    "binary.toml": bytes(range(256)) * 16,
    "binary.json": bytes(range(256)) * 16,
    "deep.json": b"[" * 100_000,
    "deep.toml": b"a = " + b"[" * 100_000,
    "deep_tables.json": b'{"a":' * 100_000,
    "empty.toml": b"",
    "empty.json": b"",
    "digits.json": b'{"notation": "block dim", "sizes": {"block": ' + b"9" * 5000 + b', "dim": 1}}',
    "digits.toml": b'notation = "block dim"\nsizes = {block = ' + b"9" * 5000 + b", dim = 1}",
    "large.json": b'{"notation": "block dim", "sizes": {"block": ' + b"9" * 30 + b', "dim": 1}}',
    "nan.json": b'{"notation": "block dim", "sizes": {"block": NaN, "dim": 1}}',
    "zero.json": rb'{"notation": "block\u0000dim", "sizes": {}}',
    "surrogate.json": rb'{"notation": "\ud800", "sizes": {}}',
    "nested.json": b'{"layouts": [{"layouts": [{}]}]}',
    "kinds.json": b'{"notation": ["block"], "sizes": []}',
    "layers.json": b'{"notation": "block dim", "sizes": {"block": 1, "dim": 1}, "layers": ["a", 1e400]}',
    "seams.json": b'{"notation": "block dim", "sizes": {"block": 9, "dim": 1}, "seams": ["x", {}]}',
}
PATHS = (
    "nowhere.toml",
    "",
    " ",
    "block dim",
    "a/b",
    "/dev/null/x.toml",
    "\udcff.toml",
    "x\0.toml",
    ":",
    "((",
    "é",
    "-----",
)
NUMBERS = ("9" * 18, "9" * 40, "-1", "1e999", "nan", "inf", "0", "", "x", "0.5")


def said(capsys, *argv):
    """What a command says on stderr: nothing, or one line."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert "Traceback" not in out + err
    assert err.count("\n") in (0, 1)
    assert not err or err.startswith("kvplan: ")
    assert bool(err) or code != 2
    return err


def commands_on(spec):
    """Every command that reads a layout, with this one."""
    yield "inspect", spec
    yield "inspect", spec, "--json"
    yield "plan", spec, GPU, "--src", "0", "--dst", "0"
    yield "explain", GPU, spec
    yield "diff", spec, GPU
    yield "diff", GPU, spec, "--json"


@pytest.mark.parametrize("name", SPECS_OF)
def test_files_that_are_no_spec(capsys, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(SPECS_OF[name])
    for argv in commands_on(str(path)):
        assert said(capsys, *argv)


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_are_none(capsys, path):
    for argv in commands_on(path):
        assert said(capsys, *argv)


def test_a_directory(capsys, tmp_path):
    for argv in commands_on(str(tmp_path)):
        assert "Is a directory" in said(capsys, *argv)


@pytest.mark.parametrize("text", PATHS)
@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("pairs", "--host"),
        ("pairs", "--device"),
        ("doctor", "--device"),
        ("calibrate", "--device"),
        ("bench", "--device"),
        ("bench", "--device", "cpu", "--sizes"),
        ("demo", "--engine"),
        ("inspect", "--model"),
        ("explain", GPU, HOST, "--blocks", "0", "--profile"),
        ("explain", GPU, HOST, "--blocks", "0", "--overlap"),
        ("plan", GPU, HOST, "--dst", "0", "--src"),
        ("diff", GPU, HOST, "--change"),
    ],
    ids=" ".join,
)
def test_names_that_are_none(capsys, argv, text):
    if argv == ("inspect", "--model") and not text.strip("-"):
        pytest.skip("without a name it lists the models")
    assert said(capsys, *argv, text)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_are_none(capsys, number):
    tiny = ("block token dim", "block token dim")
    for argv in (
        ("inspect", "block dim", "--sizes", f"block={number},dim=8"),
        ("inspect", "layer: block dim", "--sizes", f"layer={number},block=1,dim=8"),
        ("diff", *tiny, "--sizes", f"block={number},token=8,dim=8"),
        ("diff", *tiny, "--sizes", f"block=8,token=8,dim={number}"),
        ("plan", GPU, HOST, "--src", "0", "--dst", "1", "--max-bytes", number),
        ("plan", GPU, HOST, "--src", "0", "--dst", "1", "--src-skip", number),
        ("plan", GPU, HOST, "--src", number, "--dst", "1"),
        ("inspect", "--model", "llama-3.1-8b", "--tp", number),
        ("explain", GPU, HOST, "--blocks", "0", "--staging-bytes", number),
    ):
        said(capsys, *argv)


@pytest.mark.parametrize("option", ["--requests", "--tokens", "--speed-mib"])
@pytest.mark.parametrize("number", ["9" * 18, "9" * 5000, "0", "-1", "x"])
def test_a_demo_too_large(capsys, option, number):
    assert option in said(capsys, "demo", "--engine", "numpy", option, number)


def process(*argv, **streams):
    return subprocess.run([sys.executable, "-m", "kvplan", *argv], cwd=ROOT, check=False, timeout=PATIENCE, **streams)


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("inspect", GPU),
        ("inspect", GPU, "--json"),
        ("diff", GPU, HOST),
        ("backends",),
        ("--help",),
        ("--version",),
    ],
    ids=" ".join,
)
def test_a_full_disk(argv):
    with Path("/dev/full").open("w") as full:
        done = process(*argv, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == b"kvplan: cannot write: No space left on device; is the disk full?\n"


@pytest.mark.slow
@pytest.mark.parametrize("argv", [("inspect", GPU), ("inspect", GPU, "--json"), ("diff", GPU, HOST), ("--help",)])
def test_closed_streams(argv):
    done = subprocess.run(  # a shell closes what Python always opens
        ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-m", "kvplan", *argv], cwd=ROOT, check=False, timeout=PATIENCE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr
    assert done.returncode in (0, 2)


@pytest.mark.slow
def test_a_full_disk_for_complaints():
    with Path("/dev/full").open("w") as full:
        done = process("inspect", "nowhere.toml", stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.slow
def test_arguments_that_are_no_text():
    done = process("inspect", os.fsdecode(b"\xff\xfe.toml"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)


def test_every_command_has_json(capsys):
    lack = []
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        if "--json" not in capsys.readouterr().out:
            lack.append(command)
    assert not lack

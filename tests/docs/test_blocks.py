"""Every block of a document is held to the code: run and compared, read, or parsed; fenced.py says why.

Python is run by test_figures.py.
"""

from __future__ import annotations

import argparse
import importlib
import re
import tomllib

import pytest

from kvplan import KVLayout
from kvplan.cli import main
from tests.commands import GPU, HOST, ROOT, answer
from tests.docs.fenced import BLOCKS, COMMANDS, FOREIGN, KINDS

pytestmark = pytest.mark.slow


def test_every_block_is_of_a_kind_that_is_tested():
    odd = [f"{block.path.name}:{block.line}: {block.kind!r}" for block in BLOCKS if block.kind not in KINDS]
    assert not odd, f"say what it is: {', '.join(KINDS)}"
    for block in BLOCKS:
        if block.kind == "console":
            assert block.body.startswith("$ "), f"{block.path.name}:{block.line} is no command"
    assert len(COMMANDS) == sum(len(re.findall(r"^\$ ", b.body, re.MULTILINE)) for b in BLOCKS if b.kind == "console")


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.kind == "python gpu"], ids=lambda b: f"{b.path.name}:{b.line}"
)
def test_what_needs_a_gpu_is_python_at_least(block):
    compile(block.body, block.path.name, "exec")
    named = re.search(r"# (tests/gpu/\w+\.py) does this", block.body)
    assert (ROOT / named[1]).is_file(), "a GPU's test runs it, and is named there"


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.kind == "python nixl"], ids=lambda b: f"{b.path.name}:{b.line}"
)
def test_what_needs_nixl_runs_where_it_is(block):
    code = compile(block.body, block.path.name, "exec")
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install nixl")
    exec(code, {})


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "toml"], ids=lambda b: f"{b.path.name}:{b.line}")
def test_a_spec_is_one(block):
    assert KVLayout.from_spec(tomllib.loads(block.body)).num_blocks > 0


# ---- commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A folder with the examples, and dumps of an engine's cache and of a pool, as the documents name them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, spec in (("dump", GPU), ("pool", HOST)):
        KVLayout.from_spec(spec).save(tmp_path / f"{name}.json")
    return tmp_path


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.not_run], ids=lambda c: c.where)
def test_a_command_answers_as_shown(capsys, checkout, command):
    assert command.words[0] == "kvplan", "no other program is run: give the reason in NOT_RUN"
    given = answer(capsys, *command.words[1:])
    assert given
    assert given == (command.shown or given)
    for option in ("--output", "--svg"):
        if option in command.words:
            assert (checkout / command.words[command.words.index(option) + 1]).stat().st_size


class ParsedError(Exception):
    """What a command would do is about to begin."""


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.not_run], ids=lambda c: c.where)
def test_a_command_that_is_not_run_has_these_options(monkeypatch, command):
    assert not command.shown, "an answer that nothing holds to the code"
    words = command.words
    if words[0] in FOREIGN:
        return
    if words[0] == "python" and words[1].startswith("examples/"):
        assert (ROOT / words[1]).is_file()
        return
    if words[0] == "make":
        assert set(words[1:]) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        return
    if words[:2] == ("pip", "install"):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        name, extras = re.fullmatch(r"(\.)(?:\[([\w,]+)\])?", words[2]).groups()
        assert (name, len(words)) == (".", 3)
        assert set((extras or "").split(",")) - {""} <= set(project["optional-dependencies"])
        return
    given = []

    def parsed(self, arguments=None, namespace=None):
        given.append(parse_args(self, arguments, namespace))
        raise ParsedError

    parse_args = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    if words[0] == "python":
        module = importlib.import_module(words[2])
        if hasattr(module, "__path__"):  # a package
            module = importlib.import_module(f"{words[2]}.__main__")
        with pytest.raises(ParsedError):
            module.main(list(words[3:]))
        assert set(getattr(given[0], "groups", ())) <= {*getattr(module, "GROUPS", ()), *getattr(module, "WIRES", ())}
        return
    with pytest.raises(ParsedError):
        main(words[words.index("kvplan") + 1 :])


STARTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]
ELSEWHERE = (*FOREIGN, "make", "pip", "python")  # fenced.py says why, and what runs them


@pytest.mark.parametrize("path", STARTS, ids=lambda path: path.stem)
def test_a_page_works_as_printed_in_an_empty_folder(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    done = 0
    for block in (one for one in BLOCKS if one.path == path):
        if block.kind == "python":
            exec(compile(block.body, f"{path}:{block.line}", "exec"), namespace)
            done += 1
        elif block.kind == "console":
            for command in (one for one in COMMANDS if one.block == block):
                if command.not_run is None:
                    assert main(command.words[1:]) == 0, capsys.readouterr().err
                    done += 1
                else:
                    assert command.words[0] in {"kvplan", *ELSEWHERE}, command.where
    assert done or path.stem in ("vllm", "nixl"), "engines of their own environments run these pages"

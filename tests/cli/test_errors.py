"""What goes wrong on the command line: one line on stderr, the right exit code, never a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvplan.cli import main
from tests.commands import GPU, HOST, ROOT, X_PACKED, fails

ROWS = "block token dim"
ROWS_SIZES = ("--sizes", "block=4,token=4,dim=8")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "arguments are required: COMMAND; see 'kvplan --help'"),
        (["--json"], "arguments are required: COMMAND"),
        (["inspekt"], "invalid choice: 'inspekt'"),
        (["inspect"], "arguments are required: SPEC; see 'kvplan inspect --help'"),
        (["inspect", GPU, "--jso"], "unrecognized arguments: --jso; see 'kvplan inspect --help'"),
        (["inspect", "nowhere.toml"], "cannot read the spec 'nowhere.toml': No such file or directory"),
        (["inspect", "/dev/null"], "cannot read the spec '/dev/null': a device or a pipe, not a file"),
        (["explain", GPU, HOST, "--blocks", "5000"], "--blocks names block 5000; blocks there are 0 to 1023"),
        (["explain", GPU, HOST, "--blocks", "0", "--dst", "5000"], "--dst names block 5000"),
        (["inspect", GPU, "--json", "--svg", ""], "--svg '' cannot be written"),
        (["explain", GPU, HOST, "--svg", "nowhere/made.svg"], "--svg 'nowhere/made.svg' cannot be written"),
        (["report", GPU, "--output", ""], "--output '' cannot be written"),
        (["inspect", str(ROOT)], "Is a directory"),
        (["inspect", str(ROOT / "pyproject.toml")], "pyproject.toml: spec has unknown key 'build-system'"),
        (["inspect", GPU, "--dtype", "int8"], "--dtype goes with a notation"),
        (["inspect", ROWS], "needs sizes['block']; sizes give []; give --sizes block=EXTENT,..."),
        (["inspect", ROWS, *ROWS_SIZES, "--dtype", "int3"], "dtype 'int3' is unknown"),
        (["inspect", ROWS, "--sizes", "block"], "'block' is not AXIS=EXTENT, as in layer=80,block=1024"),
        (["inspect", ROWS, "--sizes", "block=1,block=2"], "'block' is given twice"),
        (["inspect", ROWS, "--sizes", "block=4,token=4,dim=8,head=2"], "sizes name 'head'"),
        (["explain", GPU, HOST, "--sizes", "block=4"], "--sizes goes with a notation"),
        (["explain", GPU, HOST, "--dst-device", "cpu"], "--dst-device goes with a notation"),
        (["explain", GPU], "arguments are required: DST"),
        (["plan", GPU, HOST, "--src", "0"], "arguments are required: --dst"),
        (
            ["plan", GPU, HOST, "--src", "3-1", "--dst", "0"],
            "'3-1' in '3-1' is not a block id or a range of them, as in 0,1,4-7",
        ),
        (["plan", GPU, HOST, "--src", "0,,1", "--dst", "0"], "'' in '0,,1' is not a block id"),
        (["plan", GPU, HOST, "--src", "-1", "--dst", "0"], "--src"),
        (["plan", GPU, HOST, "--src", "9" * 30, "--dst", "0"], "is not a block id"),
        (["plan", GPU, HOST, "--src", "0-999999999999", "--dst", "0"], "--src names block 999999999999; blocks there"),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1024"], "blocks there are 0 to 1023"),
        (["plan", GPU, HOST, "--src", "0,1", "--dst", "1"], "2 src blocks cover 2 units"),
        (["plan", GPU, HOST, "--src", "0,1", "--dst", "1,1"], "more than once"),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1", "--src-skip", "1"], "src_skip is 1"),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1", "--src-skip", "x"], "'x' is not a whole number of at least 0"),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1", "--max-bytes", "0"], "max_nbytes is 0"),
        (
            ["plan", GPU, HOST, "--src", "0", "--dst", "1", "--limit", "some"],
            "'some' is not a whole number of at least 0",
        ),
    ],
)
def test_usage_is_one_line_and_2(capsys, argv, message):
    assert message in fails(capsys, *argv)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "notation = ", "is not TOML"),
        ("a.json", '{"notation": ', "is not JSON"),
        ("a.json", "[]", "holds a list"),
        ("a.json", "{}", "spec needs 'notation'"),
        ("a.toml", 'notation = "block dim"', "spec needs 'sizes'"),
        ("a.toml", 'notation = "block dim"\nsizes = {block = 0, dim = 2}', "an extent is an integer of at least 1"),
        ("a.toml", 'notation = "block dim"\nsizes = {block = 4, dim = 8}\nstrides = [8, 1]\ndtype = "int9"', "unknown"),
        ("a.toml", 'notation = "block dim"\nsizes = {block = 4, dim = 8}\nstrides = [4, 1]', "overlaps itself"),
    ],
)
def test_a_broken_spec_is_one_line_that_names_the_file(capsys, tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    said = fails(capsys, "explain", GPU, str(path))
    assert message in said
    assert str(path) in said


def test_bytes_that_are_no_text(capsys, tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xff\xfe")
    assert "cannot read the spec" in fails(capsys, "inspect", str(path))


AXES = "axes are layer, kv, block, token, subblock, head, dim"
HINT = 'an example is "layer: kv block token head dim"'


@pytest.mark.parametrize("json_too", [(), ("--json",)])
@pytest.mark.parametrize(
    ("notation", "said"),
    [
        ("layer: blok dim", f"unknown axis 'blok' ({AXES}) at column 8: layer: ^blok dim"),
        ("block (token dim", "a '(' that is never closed at column 7: block ^(token dim"),
        ("layer:", "no dims; a tensor has at least one at column 7: layer:^"),
        ("block token block", "block is named twice at column 13: block token ^block"),
        ("block\ttoken\x1b[31m dim", "unexpected character '\\x1b' at column 12: block token^ [31m dim"),
        ("block " * 12 + "dim", f"block is named twice at column 7: block ^{'block ' * 10}..."),
    ],
)
def test_a_notation_error_is_one_line_with_a_caret_in_the_text(capsys, notation, said, json_too):
    assert fails(capsys, "inspect", notation, "--sizes", "layer=1", *json_too) == f"{said}; {HINT}"


def test_a_file_of_one_word_needs_no_slash(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump").write_text(Path(GPU).read_text())
    assert main(["inspect", "dump", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == list(range(80))
    assert "unknown axis 'dumb'" in fails(capsys, "inspect", "dumb")


def test_a_folder_is_named_once(capsys):
    assert fails(capsys, "inspect", f"{ROOT}/").count(str(ROOT)) == 1


def test_a_notation_error_of_a_file_names_it(capsys, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('notation = "layer: blok dim"\nsizes = {}')
    said = f"{path}: unknown axis 'blok' ({AXES}) at column 8: layer: ^blok dim; {HINT}"
    assert fails(capsys, "inspect", str(path)) == said
    assert fails(capsys, "diff", GPU, str(path), "--json") == said


def test_a_long_notation_is_shown_around_the_offence(capsys):
    assert fails(capsys, "inspect", " " * 100 + "heads " + " " * 100 + "dim") == (
        f"unknown axis 'heads' ({AXES}) at column 101: ... ^heads ...; {HINT}"
    )


@pytest.mark.parametrize("command", [("explain",), ("plan", "--src", "0", "--dst", "0")])
def test_layouts_that_do_not_compile_are_a_finding(capsys, command):
    assert "lacks layers" in fails(capsys, *command, GPU, X_PACKED, code=1)
    assert main([*command, GPU, X_PACKED, "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["schema"], found["command"]) == ("kvplan.finding/1", command[0])
    assert err == f"kvplan: {found['finding']}\n"


def test_without_rich(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    for argv in (["inspect", GPU], ["plan", GPU, HOST, "--src", "0", "--dst", "0"], ["backends"]):
        assert fails(capsys, *argv) == "needs rich; pip install rich"
        assert main([*argv, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
    assert main(["explain", GPU, HOST]) == 0


def test_another_missing_module_is_no_matter_of_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvplan.cli.inspect", None)
    with pytest.raises(ModuleNotFoundError):
        main(["inspect", GPU])


def test_an_interrupt_is_one_line(capsys, monkeypatch):
    import kvplan.cli.inspect

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvplan.cli.inspect, "run", interrupted)
    assert fails(capsys, "inspect", GPU, code=130) == "interrupted"


@pytest.mark.parametrize(
    "arguments",
    [
        ("which", "9" * 5000, GPU),
        ("plan", GPU, GPU, "--src", "9" * 5000, "--dst", "0"),
        ("inspect", GPU, "--block", "9" * 5000),
        ("bench", "--device", "x" * 5000),
        ("x" * 5000,),
        ("inspect", GPU, "--" + "x" * 5000),
    ],
    ids=["address", "blocks", "block", "device", "command", "option"],
)
def test_errors_of_long_arguments_are_short(capsys, arguments):
    assert len(fails(capsys, *arguments)) < 2200

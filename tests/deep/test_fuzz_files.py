"""The fuzzer of files: a small run of it, and what it calls wrong."""

from __future__ import annotations

import pytest

from kvplan import KVLayout, LayoutError
from kvplan.memory import shared
from tests.deep import fuzz_files

pytestmark = [pytest.mark.slow, pytest.mark.slow]


@pytest.mark.parametrize("part", range(4))
def test_broken_files_are_refused_or_are_right(part, tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "ATTEMPTS", 3)
    found = [fuzz_files.examine(20, index, tmp_path) for index in range(100 * part, 100 * part + 100)]
    assert [verdict for verdict in found if verdict.wrong] == []
    assert {verdict.outcome for verdict in found} == {"refused", "accepted"}


def test_a_seed_makes_the_same_files_again():
    assert [fuzz_files.make(3, k)[:2] for k in range(50)] == [fuzz_files.make(3, k)[:2] for k in range(50)]
    assert {kind for kind, _, _ in (fuzz_files.make(3, k) for k in range(200))} == set(fuzz_files.READERS)


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (RecursionError("deep"), "RecursionError: deep"),
        (MemoryError(), "MemoryError: "),
        (AssertionError("sizes"), "AssertionError: sizes"),
        (LayoutError("clear"), ""),
    ],
)
def test_what_is_wrong(error, wrong, tmp_path, monkeypatch):
    def read(raw, folder, random):
        raise error

    for kind in fuzz_files.READERS:
        monkeypatch.setitem(fuzz_files.READERS, kind, read)
    verdict = fuzz_files.examine(1, 1, tmp_path)
    assert verdict.wrong == wrong
    assert verdict.outcome == ("failed" if wrong else "refused")


def test_a_layout_that_contradicts_itself_is_wrong():
    layout = KVLayout.from_spec({"notation": "block token dim", "sizes": {"block": 4, "token": 4, "dim": 8}})
    layout.sizes["block"] = 5
    with pytest.raises(AssertionError):
        fuzz_files.check_layout(layout, fuzz_files.Random(1))


def test_the_command_prints_its_seed_first(capsys):
    assert fuzz_files.main(["--seed", "5", "--files", "6", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed 5"
    assert lines[-1] == "6 files, 0 wrong"

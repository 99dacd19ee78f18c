"""The fuzzer of files: a small run of it, and what it calls wrong."""

from __future__ import annotations

import pytest

from kvplan.memory import shared
from tests.deep import fuzz_files

pytestmark = [pytest.mark.slow, pytest.mark.slow]


@pytest.mark.parametrize("part", range(4))
def test_broken_files_are_refused_or_are_right(part, tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "ATTEMPTS", 3)
    found = [fuzz_files.examine(20, index, tmp_path) for index in range(100 * part, 100 * part + 100)]
    assert [verdict for verdict in found if verdict.wrong] == []
    assert {verdict.outcome for verdict in found} == {"refused", "accepted"}

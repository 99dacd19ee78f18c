"""Profiles of wires: read and written, refused where wrong, and found where they are kept."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from kvplan import KVPlanError
from kvplan.cost.wire import (
    default_wire,
    find_wire,
    from_json,
    wire_path,
)

MINE = replace(default_wire("DRAM"), wire="UCX over tcp", how="calibrated", made="kvplan 0.1.0", note="")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVPLAN_WIRE", raising=False)
    return tmp_path


def changed(**values):
    return json.dumps({**json.loads(MINE.to_json()), **values})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "no profile of a wire: its schema is not 'kvplan.wire-profile'"),
        (changed(schema="kvplan.profile"), "no profile of a wire"),
        (changed(version=3), "version 3, and 2 is read here: calibrate again"),
        (changed(version=1), "version 1, and 2 is read here: calibrate again"),
        *((changed(**{name: value}), "a value of the profile of a wire is missing or wrong") for name, value in (
            ("latency", -1), ("byte", float("nan")), ("post", "1"), ("descriptor", True), ("memory", None),
            ("overlaps", 1), ("slots", -1), ("slot_nbytes", 1e300), ("gather", []),
            ("scatter", {"fixed": 0, "run": 0}), ("wire", 5),
        )),
        (changed(slots=0), "0 slots of 4194304 bytes"),
    ],
)  # fmt: skip
def test_a_wrong_profile_names_what_is_wrong(text, why):
    with pytest.raises(KVPlanError, match=why):
        from_json(text)


def save(profile, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())


def test_a_chosen_file_comes_first(monkeypatch, home):
    save(MINE, wire_path(MINE.wire, "DRAM"))
    chosen = replace(MINE, latency=0.5)
    save(chosen, home / "chosen.json")
    monkeypatch.setenv("KVPLAN_WIRE", str(home / "chosen.json"))
    assert find_wire(MINE.wire, "DRAM") == chosen


@pytest.mark.parametrize("content", [None, "{}", MINE.to_json()], ids=["missing", "broken", "of other memory"])
def test_a_file_that_cannot_be_used_is_named_and_raises_nothing(monkeypatch, home, caplog, content):
    path = home / "chosen.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("KVPLAN_WIRE", str(path))
    with caplog.at_level(logging.WARNING, logger="kvplan"):
        found = find_wire("UCX", "VRAM")
    assert found.how == "default"
    assert str(path) in found.note
    assert "kvplan calibrate --wire" in found.note
    assert str(path) in caplog.text

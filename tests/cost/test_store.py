"""Where profiles are kept, and that looking for one never fails."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvplan import KVPlanError, TransferError
from kvplan.cost import store
from kvplan.cost.profile import default
from kvplan.cuda.machine import Link, Machine

H100 = Machine("NVIDIA H100", "580.1", Link(1, 16, 5, 16), 13000, "0000:0f:00.0", 0)
NAME = "nvidia-h100_580.1_pcie5x16.json"
MINE = replace(default(), gpu="NVIDIA H100", driver="580.1", generation=5, width=16, how="calibrated", note="")
GUESS = "a guess that was measured nowhere: run `kvplan calibrate`"


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A home, a cache folder in it, and no profile that is shipped or chosen."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVPLAN_PROFILE", raising=False)
    monkeypatch.setattr(store, "PROFILES", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    return tmp_path


def own(home: Path) -> Path:
    return home / "cache" / "kvplan" / "profiles" / NAME


def ship(home: Path, name: str = "a.json", **changes) -> None:
    (home / "shipped" / name).write_text(replace(MINE, how="shipped", **changes).to_json())


def test_the_cache_folder_is_where_xdg_says(home, monkeypatch):
    assert store.folder() == home / "cache" / "kvplan" / "profiles"
    for told in ("", "relative/cache", "./cache", "~/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", told)
        assert store.folder() == home / "home" / ".cache" / "kvplan" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.folder() == home / "home" / ".cache" / "kvplan" / "profiles"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("NVIDIA A30", "550.54.15", 4, 16), "nvidia-a30_550.54.15_pcie4x16"),
        (("NVIDIA GeForce RTX(tm) 4090", "580.1", 4, 8), "nvidia-geforce-rtx-tm-4090_580.1_pcie4x8"),
        (("NVIDIA A30", "", 4, None), "nvidia-a30_any_link"),
        (("NVIDIA A30", "550 (open)/..", None, 16), "nvidia-a30_550.._link"),
        (("../../etc", "580.1", 4, 8), "etc_580.1_pcie4x8"),
        (("", "", None, None), "gpu_any_link"),
        (("\u30c6\u30b9\u30c8", "1", 1, 1), "gpu_1_pcie1x1"),
    ],
)
def test_a_name_is_one_of_a_file(given, name):
    gpu, driver, *link = given
    here = replace(H100, gpu=gpu, driver=driver, link=Link(*link, *link))
    assert store.path_of(here).name == f"{name}.json"


def save(profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())


def test_its_own_file_is_taken(home, caplog):
    save(MINE, own(home))
    ship(home)
    assert store.find(H100) == MINE
    assert not caplog.records


def test_the_chosen_one_is_taken_before_its_own(home, monkeypatch):
    save(MINE, own(home))
    save(replace(MINE, note="chosen"), home / "chosen.txt")
    monkeypatch.setenv("KVPLAN_PROFILE", str(home / "chosen.txt"))
    assert store.find(H100).note == "chosen"


def corrupt(path: Path) -> None:
    path.write_text("{")


def foreign(path: Path) -> None:
    path.write_text(replace(MINE, gpu="NVIDIA A30").to_json())


def newer(path: Path) -> None:
    path.write_text(json.dumps(json.loads(MINE.to_json()) | {"version": 3}))


def large(path: Path) -> None:
    path.write_text(MINE.to_json() + " " * (1 << 20))


def folder(path: Path) -> None:
    path.mkdir()


def binary(path: Path) -> None:
    path.write_bytes(b"\x80\xff" * 100)


def empty(path: Path) -> None:
    path.write_text("")


def unbounded(path: Path) -> None:
    document = json.loads(MINE.to_json())
    document["ceilings"]["load"] = 10**400
    path.write_text(json.dumps(document))


BAD = {
    corrupt: "Expecting property name",
    foreign: "is of NVIDIA A30, and this is NVIDIA H100",
    newer: "version 3, and 2 is read here",
    large: "more than 1,048,576 bytes",
    folder: "Is a directory",
    binary: "can't decode byte",
    empty: "Expecting value",
    unbounded: "missing or wrong",
}
every_bad = pytest.mark.parametrize(("spoil", "said"), BAD.items(), ids=[spoil.__name__ for spoil in BAD])


@every_bad
@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("shipped", [True, False])
def test_a_bad_file_is_said_and_done_without(home, monkeypatch, caplog, spoil, said, chosen, shipped):
    path = home / "chosen.json" if chosen else own(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    spoil(path)
    if chosen:
        monkeypatch.setenv("KVPLAN_PROFILE", str(path))
    if shipped:
        ship(home)
    with caplog.at_level(logging.WARNING, "kvplan"):
        found = store.find(H100)
    assert found.how == ("shipped" if shipped else "default")
    assert [record.name for record in caplog.records] == ["kvplan"]
    message = caplog.records[0].getMessage()
    assert message.startswith(f"device profile not used: {path}: ")
    assert said in message
    assert message.removeprefix("device profile not used: ") in found.note
    assert "kvplan calibrate" in found.note
    assert shipped or found.note.endswith(GUESS)


def test_a_chosen_file_that_is_not_there(home, monkeypatch, caplog):
    monkeypatch.setenv("KVPLAN_PROFILE", str(home / "nowhere.json"))
    save(MINE, own(home))  # what was chosen is not silently another
    found = store.find(H100)
    assert found.how == "default"
    assert "nowhere.json: No such file or directory; run `kvplan calibrate`" in found.note
    assert len(caplog.records) == 1


def test_a_home_that_is_not_known_or_may_not_be_read_is_no_error(home, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where the user has no home
    assert store.find(H100) == default()


def test_nothing_at_all_is_the_default_and_says_so(caplog):
    assert store.find(H100) == default()
    assert not caplog.records


def test_a_shipped_one(home):
    ship(home)
    assert store.find(H100) == replace(MINE, how="shipped")


def test_a_shipped_one_of_another_driver_says_so(home):
    ship(home, driver="570.9")
    found = store.find(H100)
    assert found.how == "shipped"
    assert found.note == "measured with driver 570.9, and this is 580.1; run `kvplan calibrate`"
    unknown = store.find(replace(H100, driver=""))
    assert unknown.note == "measured with driver 570.9, and this is not known; run `kvplan calibrate`"


def test_of_several_shipped_ones_that_of_the_driver_is_taken(home):
    ship(home, "a.json", driver="570.9")
    ship(home, "b.json")
    assert store.find(H100).driver == "580.1"


def test_a_shipped_one_of_another_link_or_gpu_is_not_taken(home):
    ship(home, "a.json", width=8)
    ship(home, "b.json", generation=4)
    ship(home, "c.json", gpu="NVIDIA H200")
    assert store.find(H100) == default()


def test_a_machine_that_nobody_knows(home, monkeypatch):
    def nobody(ordinal):
        raise TransferError(f"there is no CUDA device {ordinal}")

    ship(home)
    monkeypatch.setattr(store, "machine", nobody)
    with pytest.raises(TransferError, match="there is no CUDA device 3"):
        store.find_for(3)
    assert store.profile_of(None) == (store.by_name("H100"), "no GPU here: as on an NVIDIA H100")


def test_by_name(home):
    ship(home, "a.json")
    ship(home, "b.json", gpu="NVIDIA H200")
    save(replace(MINE, note="a file"), home / "x.json")
    assert store.by_name("default") == default()
    assert (store.by_name("h100").gpu, store.by_name("H200").gpu) == ("NVIDIA H100", "NVIDIA H200")
    assert store.by_name(str(home / "x.json")).note == "a file"
    with pytest.raises(
        KVPlanError, match=r"2 profiles are of 'h'; there are NVIDIA H100, NVIDIA H200, default, or a file"
    ):
        store.by_name("h")
    with pytest.raises(KVPlanError, match="0 profiles are of 'a30'; there are NVIDIA H100, NVIDIA H200, default, or a"):
        store.by_name("a30")
    with pytest.raises(KVPlanError, match=r"nowhere\.json: No such file or directory"):
        store.by_name(str(home / "nowhere.json"))

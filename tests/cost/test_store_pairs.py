"""Where profiles of two GPUs are kept, and that they are not taken for a GPU's own profile."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from kvplan.cost import store
from kvplan.cost.profile import default, default_pair
from kvplan.cuda.machine import Link, Machine

H200 = Machine("NVIDIA H200", "580.1", Link(1, 16, 5, 16), 13000, "0000:0f:00.0", 0)
A100 = replace(H200, gpu="NVIDIA A100")
NAME = "nvidia-h200_to_nvidia-h200_580.1_nvlink18.json"
OWN = replace(default(), gpu="NVIDIA H200", driver="580.1", generation=5, width=16, how="calibrated", note="")
PAIR = replace(default_pair(), gpu="NVIDIA H200", peer="NVIDIA H200", driver="580.1", nvlinks=18, how="calibrated",
               note="")  # fmt: skip
GUESS = default_pair().note


@dataclass(frozen=True)
class NVLink:
    """What is read of a link between two GPUs."""

    nvlinks: int | None = 18

    @property
    def key(self) -> str:
        return "link" if self.nvlinks is None else f"nvlink{self.nvlinks}" if self.nvlinks else "pcie"


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A cache folder, and no profile that is shipped or chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVPLAN_PROFILE", raising=False)
    monkeypatch.setattr(store, "PROFILES", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    return tmp_path


def find(link: NVLink = NVLink(), there: Machine = H200):
    return store.find(H200, there, link)


def own(home: Path) -> Path:
    return home / "cache" / "kvplan" / "profiles" / NAME


def save(profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())


def write(home: Path, name: str, profile) -> str:
    save(profile, home / name)
    return str(home / name)


@pytest.mark.parametrize(
    ("link", "there", "name"),
    [
        (NVLink(), H200, NAME),
        (NVLink(0), A100, "nvidia-h200_to_nvidia-a100_580.1_pcie.json"),
        (NVLink(None), A100, "nvidia-h200_to_nvidia-a100_580.1_link.json"),
    ],
)
def test_a_pair_has_a_file_of_its_own(home, link, there, name):
    assert store.path_of(H200, there, link) == home / "cache" / "kvplan" / "profiles" / name


def test_the_default_says_that_it_is_a_guess():
    assert find() == default_pair()
    assert "`kvplan calibrate --peer cuda:M`" in GUESS


def test_its_own_file_is_before_a_shipped_one_and_a_shipped_one_before_the_default(home):
    ships = replace(PAIR, how="shipped")
    write(home, "shipped/b.json", ships)
    assert find() == ships
    save(PAIR, own(home))
    assert find() == PAIR


@pytest.mark.parametrize(
    ("changes", "link"),
    [({"peer": "NVIDIA A100"}, NVLink()), ({"gpu": "NVIDIA A100"}, NVLink()), ({}, NVLink(4)), ({}, NVLink(0)),
     ({}, NVLink(None))],
)  # fmt: skip
def test_a_shipped_one_of_another_pair_or_link_is_not_taken(home, changes, link):
    write(home, "shipped/b.json", replace(PAIR, how="shipped", **changes))
    assert find(link) == default_pair()


def test_a_shipped_one_of_another_driver_says_so(home):
    write(home, "shipped/b.json", replace(PAIR, how="shipped", driver="570.9"))
    assert find().note == "measured with driver 570.9, and this is 580.1; run `kvplan calibrate --peer cuda:M`"


def test_gpus_and_pairs_are_not_taken_for_one_another(home):
    write(home, "shipped/nvidia-h200.json", replace(OWN, how="shipped"))
    write(home, "shipped/nvidia-h200_to_nvidia-h200_nvlink18.json", replace(PAIR, how="shipped"))
    assert [one.peer for one in store.shipped()] == ["", "NVIDIA H200"]
    gpu = [tuple(one.costs) for one in (store.by_name("H200"), store.find(H200))]
    assert gpu == [("load", "store", "device")] * 2
    assert tuple(find().costs) == ("push", "pull")


def test_a_file_of_a_pair_is_not_taken_for_a_gpu_and_the_other_way_round(home):
    store.path_of(H200).parent.mkdir(parents=True)
    own(home).write_text(OWN.to_json())
    store.path_of(H200).write_text(PAIR.to_json())
    assert (find(), store.find(H200)) == (default_pair(), default())


def test_a_chosen_file_is_used_where_it_fits(home, monkeypatch):
    save(OWN, store.path_of(H200))
    save(PAIR, own(home))
    gpu, pair = (write(home, f"{k}.json", replace(one, note="chosen")) for k, one in enumerate((OWN, PAIR)))
    for told, notes in ((gpu, ("chosen", "")), (pair, ("", "chosen")), (f"{gpu}{os.pathsep}{pair}", ("chosen",) * 2),
                        (f"{pair}{os.pathsep}{gpu}{os.pathsep}", ("chosen",) * 2)):  # fmt: skip
        monkeypatch.setenv("KVPLAN_PROFILE", told)
        assert (store.find(H200).note, find().note) == notes


def test_a_guess_may_be_chosen(home, monkeypatch):
    save(PAIR, own(home))
    monkeypatch.setenv("KVPLAN_PROFILE", write(home, "guess.json", default_pair()))
    assert find() == default_pair()


def test_of_several_pairs_the_one_that_fits_is_used(home, monkeypatch):
    other = write(home, "other.json", replace(PAIR, peer="NVIDIA A100"))
    mine = write(home, "mine.json", replace(PAIR, note="mine"))
    monkeypatch.setenv("KVPLAN_PROFILE", f"{other}{os.pathsep}{mine}")
    assert find().note == "mine"
    assert find(there=A100).peer == "NVIDIA A100"


def test_a_chosen_file_of_another_pair_is_said_and_done_without(home, monkeypatch, caplog):
    save(PAIR, own(home))
    told = write(home, "other.json", replace(PAIR, peer="NVIDIA A100"))
    monkeypatch.setenv("KVPLAN_PROFILE", told)
    why = f"{told}: is of NVIDIA H200 to NVIDIA A100, and this is NVIDIA H200 to NVIDIA H200"
    why += "; run `kvplan calibrate --peer cuda:M`"
    assert find() == replace(default_pair(), note=f"{why}; {GUESS}")
    assert caplog.messages == [f"device profile not used: {why}"]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_file_that_is_spoilt_is_no_error(home, monkeypatch, chosen):
    path = home / "x.json" if chosen else own(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    if chosen:
        monkeypatch.setenv("KVPLAN_PROFILE", str(path))
    found = find()
    assert found.how == "default"
    assert found.note.startswith(f"{path}: Expecting property name")


def test_by_numbers(home, monkeypatch):
    peers = ModuleType("kvplan.cuda.peers")
    asked = []

    def link_between(gpu: int, peer: int) -> NVLink:
        asked.append((gpu, peer))
        return NVLink()

    peers.link_between = link_between
    monkeypatch.setitem(sys.modules, "kvplan.cuda.peers", peers)
    monkeypatch.setattr(store, "machine", lambda ordinal: replace(H200, gpu=f"GPU {ordinal}"))
    write(home, "shipped/b.json", replace(PAIR, how="shipped", gpu="GPU 2", peer="GPU 1"))
    assert [store.find_for(*ends).how for ends in ((2, 1), (1, 2))] == ["shipped", "default"]
    assert asked == [(2, 1), (1, 2)]

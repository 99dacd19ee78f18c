"""Where profiles of a GPU and of a pair of GPUs are kept, which one is taken, and that looking never fails."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvplan import KVPlanError, TransferError
from kvplan.cost import store
from kvplan.cost.profile import DeviceProfile, default, default_pair
from kvplan.cuda.machine import Link, Machine
from kvplan.cuda.peers import PeerLink

H200 = Machine("NVIDIA H200", "580.1", Link(1, 16, 5, 16), 13000, "0000:0f:00.0", 0)
A100 = replace(H200, gpu="NVIDIA A100")
KNOWN = {"gpu": "NVIDIA H200", "driver": "580.1", "how": "calibrated", "note": ""}


def link(nvlinks: int | None = 18) -> PeerLink:
    return PeerLink(0, 1, reachable=True, nvlinks=nvlinks)


@dataclass(frozen=True)
class Kind:
    """Profiles of one kind.

    Attributes:
        mine: the machine's own.
        ends: what is asked for.
        name: its file.
        guess: the default.
        foreign: what of a shipped profile may be another's.
        this: the machine in words.
    """

    mine: DeviceProfile
    ends: tuple
    name: str
    guess: DeviceProfile
    foreign: tuple[dict, ...]
    this: str

    def find(self) -> DeviceProfile:
        return store.find(*self.ends)

    def ship(self, home: Path, name: str = "a.json", **changes) -> DeviceProfile:
        made = replace(self.mine, how="shipped", **changes)
        (home / "shipped" / name).write_text(made.to_json())
        return made


GPU = Kind(
    replace(default(), generation=5, width=16, **KNOWN), (H200,), "nvidia-h200_580.1_pcie5x16.json", default(),
    ({"width": 8}, {"generation": 4}, {"gpu": "NVIDIA H100"}), "NVIDIA H200",
)  # fmt: skip
PAIR = Kind(
    replace(default_pair(), peer="NVIDIA H200", nvlinks=18, **KNOWN), (H200, H200, link()),
    "nvidia-h200_to_nvidia-h200_580.1_nvlink18.json", default_pair(),
    ({"peer": "NVIDIA A100"}, {"gpu": "NVIDIA A100"}, {"nvlinks": 4}, {"nvlinks": None}), "NVIDIA H200 to NVIDIA H200",
)  # fmt: skip
every_kind = pytest.mark.parametrize("kind", [GPU, PAIR], ids=["gpu", "pair"])


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A home, a cache folder in it, and no profile that is shipped or chosen."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVPLAN_PROFILE", raising=False)
    monkeypatch.setattr(store, "PROFILES", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    return tmp_path


def own(kind: Kind) -> Path:
    path = store.folder() / kind.name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def save(profile: DeviceProfile, path: Path) -> str:
    path.write_text(profile.to_json())
    return str(path)


@every_kind
def test_the_chosen_one_is_before_its_own_then_a_shipped_one_and_the_default(home, monkeypatch, caplog, kind):
    assert kind.find() == kind.guess
    shipped = kind.ship(home)
    kind.ship(home, "0.json", driver="570.9")
    assert kind.find() == shipped
    save(kind.mine, own(kind))
    assert kind.find() == kind.mine
    monkeypatch.setenv("KVPLAN_PROFILE", save(replace(kind.mine, note="chosen"), home / "chosen.txt"))
    assert kind.find().note == "chosen"
    assert not caplog.records


@pytest.mark.parametrize(("kind", "changes"), [(kind, one) for kind in (GPU, PAIR) for one in kind.foreign], ids=str)
def test_a_shipped_one_of_another_link_or_gpu_is_not_taken(home, kind, changes):
    kind.ship(home, **changes)
    assert kind.find() == kind.guess


BAD: dict[str, tuple[Callable[[Kind], bytes | str | None], str]] = {
    "missing": (lambda kind: None, "No such file or directory"),
    "corrupt": (lambda kind: "{", "Expecting property name"),
    "binary": (lambda kind: b"\x80\xff" * 100, "can't decode byte"),
    "large": (lambda kind: kind.mine.to_json() + " " * (1 << 20), "more than 1,048,576 bytes"),
    "newer": (lambda kind: json.dumps(json.loads(kind.mine.to_json()) | {"version": 3}), "version 3, and 2 is read"),
    "foreign": (lambda kind: replace(kind.mine, gpu="NVIDIA A100").to_json(), "is of NVIDIA A100"),
}


@every_kind
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("chosen", [True, False])
def test_a_bad_file_is_said_and_done_without(home, monkeypatch, caplog, kind, bad, chosen):
    make, said = BAD[bad]
    content, path = make(kind), home / "chosen.json" if chosen else own(kind)
    if content is None and not chosen:
        pytest.skip("no file is no bad file")
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if chosen:
        save(kind.mine, own(kind))  # what was chosen is not silently another
        monkeypatch.setenv("KVPLAN_PROFILE", str(path))
    with caplog.at_level(logging.WARNING, "kvplan"):
        found = kind.find()
    assert found.how == "default"
    (message,) = caplog.messages
    assert message.startswith(f"device profile not used: {path}: ")
    assert said in message
    assert bad != "foreign" or f"and this is {kind.this}; run" in message
    assert message.removeprefix("device profile not used: ") in found.note
    assert found.note.endswith(kind.guess.note)


def test_a_machine_that_nobody_knows(home, monkeypatch):
    def nobody(ordinal):
        raise TransferError(f"there is no CUDA device {ordinal}")

    GPU.ship(home, gpu="NVIDIA H100")
    monkeypatch.setattr(store, "machine", nobody)
    with pytest.raises(TransferError, match="there is no CUDA device 3"):
        store.find_for(3)
    assert store.profile_of(None) == (store.by_name("H100"), "no GPU here: as on an NVIDIA H100")


def test_by_name(home):
    GPU.ship(home, "a.json", gpu="NVIDIA H100")
    GPU.ship(home, "b.json")
    PAIR.ship(home, "c.json")
    assert store.by_name("default") == default()
    assert (store.by_name("h100").gpu, store.by_name("H200").peer) == ("NVIDIA H100", "")
    assert store.by_name(save(replace(GPU.mine, note="a file"), home / "x.json")).note == "a file"
    for name, count in (("h", 2), ("a30", 0)):
        with pytest.raises(KVPlanError, match=f"{count} profiles are of '{name}'; there are NVIDIA H100, NVIDIA H200"):
            store.by_name(name)

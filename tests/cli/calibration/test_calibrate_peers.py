"""What `kvplan calibrate` measures, saves and answers for pairs of GPUs; what measures is not run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

import pytest

from kvplan import TransferError
from kvplan.cost import store
from kvplan.cost.profile import default_pair
from kvplan.cuda import machine, peers
from kvplan.cuda.peers import PeerLink
from kvplan.measure import calibrate
from tests.cli.calibrated_machine import H100, complaint, text
from tests.commands import document

PAIR_GOLDEN = """\
GPU     not known, 108 SMs
peer    any GPU
driver  not known, a link not known
made    default: kvplan, measured nowhere
push    300.0 GB/s by the copy engine, 270.0 by SMs
pull    300.0 GB/s by the copy engine, 270.0 by SMs
note    a guess that was measured nowhere: run `kvplan calibrate --peers`

                       fixed   a piece   GB/s
─────────────────────────────────────────────
push, kernel           65 us      0 ns  270.3
push, copy_engine      80 us  1,000 ns  303.0
push, copy_engine_2d  135 us  1,600 ns  303.0
pull, kernel           65 us      0 ns  270.3
pull, copy_engine      80 us  1,000 ns  303.0
pull, copy_engine_2d  135 us  1,600 ns  303.0

rate; compute         decode         prefill
───────────────────────────────────────────────────
push, kernel            0.50  x1.08     0.50  x1.08
push, copy_engine       0.90  x1.10     0.90  x1.10
push, copy_engine_2d    0.95  x1.04     0.95  x1.04
pull, kernel            0.50  x1.08     0.50  x1.08
pull, copy_engine       0.90  x1.10     0.90  x1.10
pull, copy_engine_2d    0.95  x1.04     0.95  x1.04
"""

H200 = replace(H100, gpu="NVIDIA H200")
MEASURED = replace(default_pair(), gpu="NVIDIA H100", peer="NVIDIA H100", driver="580.1", nvlinks=18, how="calibrated",
                   note="", calibrations=1)  # fmt: skip
NAME = "nvidia-h100_to_nvidia-h100_580.1_nvlink18.json"


class Host:
    """A machine's GPUs, and the links between them; it notes which pairs were measured."""

    def __init__(self, gpus: dict[int, machine.Machine], links: dict[tuple[int, int], PeerLink]) -> None:
        self.gpus, self.found, self.measured = gpus, links, []
        self.profile = MEASURED

    def machine(self, ordinal: int = 0) -> machine.Machine:
        if ordinal not in self.gpus:
            raise TransferError(f"there is no CUDA device {ordinal}; {len(self.gpus)} are visible")
        return self.gpus[ordinal]

    def link_between(self, gpu: int, peer: int) -> PeerLink:
        return self.found[gpu, peer]

    def links(self) -> tuple[PeerLink, ...]:
        return tuple(self.found.values())

    def calibrate_pair(self, here, device, peer, progress=None, *, peer_name, nvlinks):
        self.measured.append((device, peer))
        return replace(self.profile, gpu=here.gpu, peer=peer_name, nvlinks=nvlinks)


def joined(gpu: int, peer: int, nvlinks: int | None = 18) -> PeerLink:
    return PeerLink(gpu, peer, reachable=True, nvlinks=nvlinks)


def apart(gpu: int, peer: int) -> PeerLink:
    return PeerLink(gpu, peer, reachable=False, why="a reason", nvlinks=0)


@pytest.fixture
def host(monkeypatch):
    """Four GPUs: two H100s on NVLink, an H200 that both reach over PCIe, and an H100 out of reach."""

    def made(gpus=(H100, H100, H200, H100), reach=lambda gpu, peer: joined(gpu, peer, 18 if gpu + peer == 1 else 0)
             if 3 not in (gpu, peer) else apart(gpu, peer)):  # fmt: skip
        links = {(k, n): reach(k, n) for k in range(len(gpus)) for n in range(len(gpus)) if k != n}
        one = Host(dict(enumerate(gpus)), links)
        monkeypatch.setattr(machine, "machine", one.machine)
        monkeypatch.setattr(peers, "link_between", one.link_between)
        monkeypatch.setattr(peers, "links", one.links)
        monkeypatch.setattr(calibrate, "calibrate_pair", one.calibrate_pair)
        return one

    return made


def reason(capsys, *argv: str) -> str:
    return complaint(capsys, *argv).removeprefix("kvplan: ").rstrip()


def test_a_pair_reads_well_at_80_columns(capsys, host):
    one = host()
    one.profile = default_pair()
    out, _ = text(capsys, "--peer", "cuda:1", "--alone")
    shown = (PAIR_GOLDEN.replace("not known, 108 SMs", "NVIDIA H100, 108 SMs")
             .replace("any GPU", "NVIDIA H100").replace("a link not known", "NVLink, 18 links"))  # fmt: skip
    assert out == shown
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("device", [(), ("--device", "cuda:0")])
def test_what_is_measured_is_what_is_found_later(capsys, host, folder, device):
    one = host()
    _, err = text(capsys, *device, "--peer", "cuda:1")
    assert one.measured == [("cuda:0", "cuda:1")]
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert store.find_between(H100, H100, joined(0, 1)) == store.read(folder / NAME) == MEASURED
    assert f"saved {folder / NAME}" in err


def test_another_file_and_the_other_way(capsys, host, folder, tmp_path):
    one = host()
    text(capsys, "--device", "cuda:2", "--peer", "cuda:0", "--output", str(tmp_path / "mine.json"))
    assert one.measured == [("cuda:2", "cuda:0")]
    assert store.read(tmp_path / "mine.json").kind == "NVIDIA H200 to NVIDIA H100"
    assert not list(folder.glob("*"))


def test_it_is_weighed_with_earlier_ones_unless_it_is_to_stand_alone(capsys, host):
    one = host()
    for push, argv, ceiling, count in ((300.0, (), 300.0, 1), (320.0, (), 310.0, 2), (330.0, ("--alone",), 330.0, 1)):
        one.profile = replace(MEASURED, ceilings=dict(MEASURED.ceilings) | {"push": push})
        text(capsys, "--peer", "cuda:1", *argv)
        found = store.find_between(H100, H100, joined(0, 1))
        assert (found.ceilings["push"], found.calibrations) == (ceiling, count)


def test_the_document_of_a_pair(capsys, host, folder):
    host()
    given = document(capsys, "calibrate", "--peer", "cuda:1")
    assert list(given) == ["schema", "path", "seconds", "profile"]
    assert (given["schema"], given["path"]) == ("kvplan.calibrate/1", str(folder / NAME))
    assert given["profile"] == json.loads(json.dumps(asdict(MEASURED)))


def test_all_pairs_are_measured_once_for_each_kind(capsys, host, folder):
    one = host()
    out, err = text(capsys, "--peers")
    assert one.measured == [("cuda:0", "cuda:1"), ("cuda:0", "cuda:2"), ("cuda:2", "cuda:0")]
    assert {path.name for path in folder.iterdir()} == {
        NAME,
        "nvidia-h100_to_nvidia-h200_580.1_pcie.json",
        "nvidia-h200_to_nvidia-h100_580.1_pcie.json",
    }
    assert out.count("peer    NVIDIA H200\n") == 1
    assert "for cuda:0 to cuda:1, cuda:1 to cuda:0\n" in err
    assert "for cuda:0 to cuda:2, cuda:1 to cuda:2\n" in err
    shown = "cuda:0 to cuda:3, cuda:1 to cuda:3, cuda:2 to cuda:3, cuda:3 to cuda:0 and 2 more pairs"
    assert [line for line in err.splitlines() if "not measured" in line] == [f"not measured: {shown}: a reason"]


def test_pairs_of_eight_gpus_are_named_in_one_short_line(capsys, host):
    one = host((H100,) * 8, joined)
    _, err = text(capsys, "--peers")
    assert one.measured == [("cuda:0", "cuda:1")]
    assert "for cuda:0 to cuda:1, cuda:0 to cuda:2, cuda:0 to cuda:3, cuda:0 to cuda:4 and 52 more pairs\n" in err
    assert "not measured" not in err


def test_the_document_of_all_pairs(capsys, host, folder):
    host()
    given = document(capsys, "calibrate", "--peers")
    assert list(given) == ["schema", "seconds", "profiles", "unreachable"]
    assert given["schema"] == "kvplan.calibrate-peers/1"
    assert [one["pairs"] for one in given["profiles"]] == [
        [["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]],
        [["cuda:0", "cuda:2"], ["cuda:1", "cuda:2"]],
        [["cuda:2", "cuda:0"], ["cuda:2", "cuda:1"]],
    ]
    assert given["profiles"][0]["path"] == str(folder / NAME)
    assert given["unreachable"][0] == {"pair": ["cuda:0", "cuda:3"], "why": apart(0, 3).why}
    assert len(given["unreachable"]) == 6


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--peer", "cuda:0"), "--peer is cuda:0, the GPU itself; a pair has two GPUs, as in --device cuda:0 --peer"),
        (("--device", "cuda:1", "--peer", "cuda:1"), "--peer is cuda:1, the GPU itself"),
        (("--peer", "cuda:3"), "cuda:0 cannot reach the memory of cuda:3: a reason"),
        (("--peer", "cuda:7"), "there is no CUDA device 7; 4 are visible"),
        (("--device", "cuda:7", "--peer", "cuda:0"), "there is no CUDA device 7; 4 are visible"),
        (("--peer", "cpu"), "argument --peer: 'cpu' is not a GPU, as in cuda:0"),
        (("--peer", "cuda:1", "--peers"), "argument --peers: not allowed with argument --peer"),
        (("--peers", "--device", "cuda:0"), "--device is for one GPU or pair, and --peers measures all"),
        (("--peers", "--output", "x.json"), "--output is for one GPU or pair, and --peers measures all pairs"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_said(capsys, host, argv, said):
    one = host()
    assert reason(capsys, *argv).startswith(said)
    assert not one.measured


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ((H100,), "--peers needs two GPUs, and fewer are visible"),
        ((H100, H200), "no GPU reaches the memory of another: cuda:0 cannot reach the memory of cuda:1: a reason"),
    ],
)
def test_without_a_pair_it_says_so(capsys, host, gpus, said):
    host(gpus, apart)
    assert reason(capsys, "--peers") == said


@pytest.mark.parametrize("argv", [("--peer", "cuda:1"), ("--peers",)])
def test_without_torch_it_says_so(capsys, host, monkeypatch, argv):
    one = host()
    monkeypatch.setitem(sys.modules, "torch", None)
    assert reason(capsys, *argv) == "calibrating needs torch; pip install torch triton cuda-bindings"
    assert not one.measured

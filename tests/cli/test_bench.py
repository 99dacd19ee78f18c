"""What `kvplan bench` answers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

import kvplan.cost
import kvplan.measure
from kvplan.cli import machine as command
from kvplan.cli import main
from kvplan.cuda import machine, peers
from kvplan.errors import TransferError
from kvplan.measure.bench import KINDS, PEER_SIZES, Bench
from kvplan.measure.rows import Missing, row_of
from tests.commands import answer, document, hold_screen
from tests.measure.bench_rows import LINK, NVLINK, row, rows

TINY = ("bench", "--device", "cpu", "--sizes", "512,4K", "--counts", "16,64", "--memory", "64K", "--seconds", "600")


def chosen():
    """Of the made-up rows, one panel with two counts, one kind of compute, and two broken figures."""
    some = [one for one in rows() if one.beside == "prefill"]
    some += [one for one in rows() if (one.direction, one.host, one.beside, one.run_nbytes)
             == ("load", "scattered", "idle", 8 << 10) and one.path != "cuMemcpyAsync a run"]  # fmt: skip
    some[0] = replace(some[0], gbps=None, slowdown=None, broken="it took no time")
    some[-1] = replace(some[-1], gbps=None, share=None, broken="57.9 GB/s is faster than the link's 55.1 GB/s")
    return some


MISSING = [
    Missing("512 KiB x 65,536", "more than 256 MiB"),
    *(Missing(f"load, scattered, {k} KiB x 16", "60 seconds were over") for k in range(1, 8)),
]


@pytest.fixture
def found(monkeypatch):
    """``found(rows)``: a GPU is there, and this is what was measured of it; gives what was asked."""
    asked = []

    def finding(some, missing=(), ceilings=LINK):
        class Run:
            def __init__(self, bench):
                asked.append(bench)
                self.bench, self.ceilings, self.missing = bench, ceilings, list(missing)

            def rows(self):
                if hasattr(self, "progress"):  # nobody looks
                    self.progress(0.5, "half")
                yield from some

        monkeypatch.setattr("kvplan.measure.bench.Run", Run)
        monkeypatch.setattr(command, "need_torch", lambda device: None)
        named = machine.Machine("NVIDIA H100 80GB HBM3", "580.159.04", machine.Link(5, 16), 13000, "", None)
        monkeypatch.setattr(machine, "machine", lambda ordinal: named)
        return asked

    return finding


def test_it_reads_well_at_80_columns(capsys, found):
    found(chosen(), MISSING)
    text = answer(capsys, "bench", code=1)
    hold_screen("bench-gpu", text)
    assert "57.9 " not in text.partition("broken: ")[0]


def test_a_peer_that_cannot_be_reached_is_refused_at_once(capsys, found, monkeypatch):
    asked = found([])
    closed = peers.PeerLink(0, 1, reachable=False, why="IOMMU")
    monkeypatch.setattr(peers, "link_between", lambda gpu, peer: closed)
    assert main(["bench", "--peer", "cuda:1"]) == 2
    assert capsys.readouterr() == ("", "kvplan: cuda:0 cannot reach the memory of cuda:1: IOMMU\n")
    assert asked == []


def test_between_gpus(capsys, found, monkeypatch):
    monkeypatch.setattr(peers, "link_between", lambda gpu, peer: peers.PeerLink(gpu, peer, reachable=True, nvlinks=18))
    alone = {"kernel": 360.0, "auto": 361.0, "one large copy": 395.0, "cuMemcpyBatchAsync": 12.8}
    some = [row(path, gbps, direction="push", host="scattered", runs=131072) for path, gbps in alone.items()]
    some += [row("kernel", gbps, direction=way, beside="decode", beside_on=on, programs=programs, slowdown=slowdown,
                 runs=81920)
             for way, on, programs, gbps, slowdown in (
                 ("push", "device", None, 178.0, 1.03), ("push", "device", 16, 291.0, 1.29),
                 ("pull", "device", None, 97.0, 1.07), ("pull", "peer", 16, 328.0, 1.06))]  # fmt: skip
    asked = found(some, ceilings=NVLINK)
    hold_screen("bench-peers", answer(capsys, "bench", "--peer", "cuda:1"))
    given = document(capsys, "bench", "--peer", "cuda:1", "--beside-on", "peer")
    assert (given["link"], given["ceilings"]["push"]) == ("NVLink, 18 links", 395.0)
    assert [row_of(one) for one in given["rows"]] == some
    usual, own = asked
    assert usual == Bench("cuda:0", PEER_SIZES, (160, 0), ("push", "pull"), beside=tuple(KINDS), most_nbytes=1 << 30,
                          peer="cuda:1", beside_on=("device", "peer"))  # fmt: skip
    assert own.beside_on == ("peer",)


def test_without_a_gpu_it_measures_the_cpu_and_says_so(capsys, monkeypatch):
    def machine_of(ordinal):
        raise TransferError("there is no CUDA driver")

    monkeypatch.setattr(machine, "machine", machine_of)
    assert main(["bench", *TINY[3:], "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["device"] == "cpu"
    assert err == "kvplan: there is no CUDA driver; measuring the CPU\n"
    assert main(["bench", "--device", "cuda:0"]) == 2
    assert capsys.readouterr() == ("", "kvplan: there is no CUDA driver\n")


@pytest.mark.slow
def test_it_draws(capsys, found, tmp_path):
    pytest.importorskip("matplotlib")
    found(rows())
    assert main(["bench", "--plot", str(tmp_path / "made.svg")]) == 0
    paths = [tmp_path / f"made{name}.svg" for name in ("", "-frontier")]
    assert capsys.readouterr().err == "".join(f"drawn {path}\n" for path in paths)
    assert all(ET.parse(path).getroot().tag.endswith("svg") for path in paths)


def test_plots_without_matplotlib(capsys, monkeypatch, found):
    asked = found(rows())
    monkeypatch.delitem(sys.modules, "kvplan.measure.plots", raising=False)
    monkeypatch.delattr(kvplan.measure, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", "made.svg"]) == 2
    assert capsys.readouterr() == ("", "kvplan: plots need matplotlib; pip install matplotlib\n")
    assert asked == []  # it is said before anything is measured

"""What `kvplan bench` answers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

import kvplan.cost
import kvplan.measure
from kvplan.cli import bench as command
from kvplan.cli import main
from kvplan.cli.screen.printing import show
from kvplan.cuda import machine, peers
from kvplan.errors import TransferError
from kvplan.measure import baselines, flights
from kvplan.measure.grid import COUNTS, KINDS, PEER_SIZES, SIZES, Bench, paths_of
from kvplan.measure.rows import Ceilings, Missing, row_of
from tests.commands import answer, document, python
from tests.measure.bench_rows import ALONE, LINK, NVLINK, row, rows

TINY = ("bench", "--device", "cpu", "--sizes", "512,4K", "--counts", "16,64", "--memory", "64K", "--seconds", "600")

GOLDEN = """\
NVIDIA H100 80GB HBM3 (cuda:0); link: load 55.1 GB/s, store 55.2 GB/s

load, runs scattered on the host: GB/s

                                 copy_                  cuMem  cuMem   torch
                         copy_  engine                    cpy    cpy  index-
    run   runs    auto  engine     _2d  kernel  staged  Batch  a run     ing
────────────────────────────────────────────────────────────────────────────
  8 KiB     16    43.3    4.72    38.7    40.6    26.8   4.64   3.52    9.84
  8 KiB  1,024  broken    5.90    48.4    50.8    33.5   5.80   4.40    12.3
512 KiB     16    43.7    37.6    43.1    40.7    43.6   32.8      -    10.2
512 KiB  1,024    54.6    47.0    53.9    50.9    54.5   41.0      -    12.8

beside prefill: GB/s, and how much slower compute gets;
8,192 runs of 8 KiB, blocks contiguous on the host

path, programs       load  compute   store  compute
───────────────────────────────────────────────────
copy_engine          5.80    x1.00    16.0    x1.00
copy_engine_2d       48.0    x1.00    47.0    x1.00
kernel, 4            46.0    x1.13       -        -
kernel, 2               -        -    51.0    x1.21
staged               48.6    x1.02    46.3    x1.01
cuMemcpyBatchAsync   5.70    x1.00    15.8    x1.00
cuMemcpyAsync a run  4.20    x1.00    6.10    x1.00
torch indexing       12.0    x1.01  broken        -

broken: auto, load, scattered, 8 KiB x 1,024: 57.9 GB/s is faster than the
link's 55.1 GB/s
broken: torch indexing, store, contiguous, 8 KiB x 8,192, beside prefill: it
took no time

not measured: more than 256 MiB: 512 KiB x 65,536
not measured: 60 seconds were over: load, scattered, 1 KiB x 16; load,
scattered, 2 KiB x 16; load, scattered, 3 KiB x 16; load, scattered, 4 KiB x 16
and 3 more
"""


def chosen():
    """Of the made-up rows, one panel with two sizes, one kind of compute, and two broken figures."""
    found = []
    for one in (replace(one, runs=1024) if one.beside == "idle" and one.runs != 16 else one for one in rows()):
        if one.beside == "prefill":
            found.append(one)
        elif (one.direction, one.host, one.beside) == ("load", "scattered", "idle"):
            if one.run_nbytes == 8 << 10:
                found.append(one)
            elif one.run_nbytes == 128 << 10 and one.path != baselines.LOOP:
                found.append(replace(one, run_nbytes=512 << 10))
    at = next(k for k, one in enumerate(found) if (one.path, one.runs) == ("auto", 1024))
    found[at] = replace(found[at], gbps=None, share=None, broken="57.9 GB/s is faster than the link's 55.1 GB/s")
    found[-1] = replace(found[-1], gbps=None, slowdown=None, broken="it took no time")
    return found


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
        monkeypatch.setattr(command, "_need_torch", lambda device: None)
        named = machine.Machine("NVIDIA H100 80GB HBM3", "580.159.04", machine.Link(5, 16), 13000, "", None)
        monkeypatch.setattr(machine, "machine", lambda ordinal: named)
        return asked

    return finding


def test_it_reads_well_at_80_columns(capsys, found):
    found(chosen(), MISSING)
    text = answer(capsys, "bench", code=1)
    assert text == GOLDEN
    assert max(map(len, text.splitlines())) <= 80
    assert "57.9 " not in text.partition("broken: ")[0]


def test_the_widest_tables_fit(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    wide = [row(path, 54.123, run_nbytes=512 << 10, runs=65536) for path in ALONE]
    wide[3] = replace(wide[3], gbps=None, broken="it took no time")
    show(*command.screen("a GPU", LINK, wide, ()))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-3].split() == ["512", "KiB", "65,536", "54.1", "54.1", "54.1", "broken", *["54.1"] * 4]


def test_its_document(capsys, found):
    found(chosen(), MISSING)
    given = document(capsys, "bench", code=1)
    assert list(given) == ["schema", "device", "name", "seconds", "asked", "ceilings", "broken", "rows", "missing"]
    assert (given["schema"], given["device"], given["broken"]) == ("kvplan.bench/1", "cuda:0", 2)
    assert given["ceilings"] == {"load": 55.1, "store": 55.2, "what": "link", "hard": True}
    assert [row_of(one) for one in given["rows"]] == chosen()
    assert given["missing"][0] == {"what": "512 KiB x 65,536", "why": "more than 256 MiB"}
    assert given["asked"]["most_nbytes"] == 256 << 20
    assert set(given["rows"][0]) == {
        "direction", "host", "run_nbytes", "runs", "block_runs", "path", "beside", "programs", "seconds", "wall",
        "cpu", "samples", "gbps", "share", "slowdown", "predicted", "verified", "broken", "nbytes", "beside_on",
    }  # fmt: skip


PEER_GOLDEN = """\
NVIDIA H100 80GB HBM3 (cuda:0) and NVIDIA H100 80GB HBM3 (cuda:1), NVLink, 18
links; link: push 395.0 GB/s, pull 394.0 GB/s

push, runs scattered on the peer: GB/s

                               cuMem    one   NCCL
                                 cpy  large  send/
  run     runs   auto  kernel  Batch   copy   recv
──────────────────────────────────────────────────
8 KiB  131,072  361.0   360.0   12.8  395.0  120.0

beside decode: GB/s, and how much slower compute gets;
81,920 runs of 8 KiB, blocks contiguous on the peer

path, programs  pull  compute   push  compute
─────────────────────────────────────────────
kernel          97.0    x1.07  178.0    x1.03
kernel, 16         -        -  291.0    x1.29

beside decode on the peer: GB/s, and how much slower compute gets;
81,920 runs of 8 KiB, blocks contiguous on the peer

path, programs   pull  compute
──────────────────────────────
kernel, 16      328.0    x1.06
"""


def test_a_peer_that_cannot_be_reached_is_refused_at_once(capsys, found, monkeypatch):
    asked = found([])
    closed = peers.PeerLink(0, 1, reachable=False, why="IOMMU")
    monkeypatch.setattr(peers, "link_between", lambda gpu, peer: closed)
    assert main(["bench", "--peer", "cuda:1"]) == 2
    assert capsys.readouterr() == ("", "kvplan: cuda:0 cannot reach the memory of cuda:1: IOMMU\n")
    assert asked == []


def test_between_gpus(capsys, found, monkeypatch):
    monkeypatch.setattr(peers, "link_between", lambda gpu, peer: peers.PeerLink(gpu, peer, reachable=True, nvlinks=18))
    alone = {"kernel": 360.0, "auto": 361.0, "one large copy": 395.0, "cuMemcpyBatchAsync": 12.8, "NCCL send/recv": 120}
    some = [row(path, gbps, direction="push", host="scattered", runs=131072) for path, gbps in alone.items()]
    some += [row("kernel", gbps, direction=way, beside="decode", beside_on=on, programs=programs, slowdown=slowdown,
                 runs=81920)
             for way, on, programs, gbps, slowdown in (
                 ("push", "device", None, 178.0, 1.03), ("push", "device", 16, 291.0, 1.29),
                 ("pull", "device", None, 97.0, 1.07), ("pull", "peer", 16, 328.0, 1.06))]  # fmt: skip
    asked = found(some, ceilings=NVLINK)
    assert answer(capsys, "bench", "--peer", "cuda:1") == PEER_GOLDEN
    given = document(capsys, "bench", "--peer", "cuda:1", "--beside-on", "peer")
    assert (given["peer"], given["peer_name"]) == ("cuda:1", "NVIDIA H100 80GB HBM3")
    assert given["link"] == "NVLink, 18 links"
    assert given["ceilings"] == {
        "load": None,
        "store": None,
        "what": "link",
        "hard": True,
        "push": 395.0,
        "pull": 394.0,
    }
    assert [row_of(one) for one in given["rows"]] == some
    answer(capsys, "bench", "--peer", "cuda:0", "--quick")
    usual, own, within = asked
    assert usual == Bench("cuda:0", PEER_SIZES, (160, 0), ("push", "pull"), beside=KINDS, most_nbytes=1 << 30,
                          peer="cuda:1", beside_on=("device", "peer"))  # fmt: skip
    assert own.beside_on == ("peer",)
    assert within == Bench("cuda:0", (8192, 65536), (0,), ("device",), ("scattered",), beside=("decode",), seconds=5.0,
                           most_nbytes=256 << 20, peer="cuda:0")  # fmt: skip


def test_what_is_asked_for(capsys, found):
    asked = found([row("kernel", 50.0)])
    answer(capsys, "bench")
    answer(capsys, "bench", "--quick", "--seconds", "9")
    answer(capsys, "bench", "--device", "cuda:3", "--sizes", "28KiB, 1m,8", "--counts", "64", "--directions", "store",
           "--hosts", "scattered", "--paths", "torch indexing,kernel,kernel", "--beside", "none", "--memory", "1G",
           "--seconds", "2.5")  # fmt: skip
    usual, quick, own = asked
    assert usual == Bench("cuda:0", beside=KINDS)
    assert (usual.sizes, usual.counts, usual.seconds, usual.most_nbytes) == (SIZES, COUNTS, 60.0, 256 << 20)
    assert quick == Bench("cuda:0", sizes=(4096, 65536), counts=(1024,), beside=("decode",), seconds=9.0,
                          most_nbytes=64 << 20)  # fmt: skip
    assert own == Bench("cuda:3", (28672, 1 << 20, 8), (64,), ("store",), ("scattered",), ("torch indexing", "kernel"),
                        (), 2.5, 1 << 30)  # fmt: skip


@pytest.mark.slow
def test_the_cpu_is_measured(capsys):
    given = document(capsys, *TINY)
    assert (given["device"], given["name"], given["broken"]) == ("cpu", "CPU", 0)
    assert given["ceilings"]["hard"] is False
    assert {one["path"] for one in given["rows"]} == set(paths_of("cpu"))
    assert len(given["rows"]) == 4 * 3 * 4
    assert all(one["verified"] and one["gbps"] > 0 for one in given["rows"])
    assert given["missing"] == [{"what": "4 KiB x 64", "why": "more than 64 KiB"}]
    text = answer(capsys, *TINY, "--paths", "host,numpy memcpy", "--directions", "load")
    assert text.startswith("CPU (cpu); memcpy: ")
    assert text.count("blocks contiguous on the host") == text.count("runs scattered on the host") == 1
    assert text.endswith("not measured: more than 64 KiB: 4 KiB x 64\n")


def test_bytes_that_do_not_arrive_are_a_finding(capsys, monkeypatch):
    def maker(moved):
        return baselines.verified(baselines.MEMCPY, moved, lambda: flights.AtOnce(moved.plan.nbytes, lambda: None))

    monkeypatch.setattr(baselines, "makers", lambda device: {baselines.MEMCPY: maker})
    text = answer(capsys, *TINY, "--paths", "host,numpy memcpy", code=1)
    assert "broken: numpy memcpy, load, contiguous, 512 B x 16: numpy memcpy: not every byte of" in " ".join(
        text.split()
    )
    assert text.count("broken: ") == 3 * 4


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


def test_nothing_at_all(capsys, found):
    found([], ceilings=None)
    assert answer(capsys, "bench") == "nothing was measured\n"


# Files.


def test_it_keeps_its_document(capsys, found, tmp_path):
    found(chosen())
    path = tmp_path / "made.json"
    assert main(["bench", "--json", "--output", str(path)]) == 1
    out, err = capsys.readouterr()
    assert path.read_text() == out
    assert err == f"saved {path}\n"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".svg", ".png", ".SVG"])
def test_it_draws(capsys, found, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    found(rows())
    assert main(["bench", "--plot", str(tmp_path / f"made{suffix}")]) == 0
    paths = [tmp_path / f"made{name}{suffix}" for name in ("", "-frontier")]
    assert capsys.readouterr().err == "".join(f"drawn {path}\n" for path in paths)
    for path in paths:
        if suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ET.parse(path).getroot().tag.endswith("svg")


def test_without_compute_one_plot_is_drawn(capsys, found, tmp_path):
    pytest.importorskip("matplotlib")
    found([row("host", 9.0)], ceilings=Ceilings(9.0, 9.0, "memcpy", hard=False))
    assert main(["bench", "--device", "cpu", "--plot", str(tmp_path / "made.svg")]) == 0
    assert capsys.readouterr().err == f"drawn {tmp_path / 'made.svg'}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["made.svg"]


def test_what_there_is_nothing_to_draw_of_is_said(capsys, found, tmp_path):
    pytest.importorskip("matplotlib")
    found([row("host", None)], ceilings=Ceilings(9.0, 9.0, "memcpy", hard=False))
    assert main(["bench", "--device", "cpu", "--plot", str(tmp_path / "made.svg")]) == 0
    assert "made.svg was not drawn: no row has a figure" in capsys.readouterr().err


def test_plots_without_matplotlib(capsys, monkeypatch, found):
    asked = found(rows())
    monkeypatch.delitem(sys.modules, "kvplan.measure.plots", raising=False)
    monkeypatch.delattr(kvplan.measure, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", "made.svg"]) == 2
    assert capsys.readouterr() == ("", "kvplan: plots need matplotlib; pip install matplotlib\n")
    assert asked == []  # it is said before anything is measured


# Usage.


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--sizes", "4X"), "argument --sizes: '4X' is not a size; give bytes, as in 512, 4K or 1M"),
        (("--sizes", "4K,,8K"), "'' is not a size"),
        (("--sizes", "0"), "'0' is not a size"),
        (("--sizes", "100"), "runs of 100 bytes; give a multiple of 8"),
        (("--counts", "1e3"), "argument --counts: '1e3' is not a list of runs; give numbers, as in 16,1024"),
        (("--counts", "17"), "17 runs; give an even number"),
        (("--directions", "up"), "unknown direction 'up'; expected one of load, store"),
        (("--directions", ""), "directions is empty"),
        (("--hosts", "here"), "unknown host 'here'; expected one of contiguous, scattered"),
        (("--paths", "warp"), "unknown path on cpu 'warp'; expected one of host, host on 1 thread, numpy memcpy"),
        (("--beside", "decode"), "only a GPU is measured beside compute"),
        (("--seconds", "-1"), "seconds is -1.0; give a number above 0"),
        (("--seconds", "soon"), "argument --seconds: invalid float value: 'soon'"),
        (("--memory", "4"), "nothing fits into 4 B"),
        (("--plot", "made.pdf"), "argument --plot: 'made.pdf' does not end in .png or .svg"),
        (("--plot", "nowhere/made.svg"), "--plot 'nowhere/made.svg' cannot be written: No such file or directory"),
        (
            ("--output", "nowhere/made.json"),
            "--output 'nowhere/made.json' cannot be written: No such file or directory",
        ),
        (("--device", "gpu"), "argument --device: 'gpu' is not a GPU, as in cuda:0"),
        (("--peer", "cpu"), "argument --peer: 'cpu' is not a GPU, as in cuda:0"),
        (("--beside-on", "peer"), "unknown GPU of compute 'peer'; expected one of device"),
        (("--peer", "process", "--paths", "host"), "--paths does not go with --peer process"),
        (("--peer", "process", "--beside-on", "peer"), "--beside-on does not go with --peer process"),
        (("--peer", "process:cpu"), "argument --peer: 'cpu' is not a GPU, as in cuda:0"),
        (("--peer", "process:cuda:1"), "device 'cpu', peer 'cuda:1'; expected two GPUs, or the CPU twice"),
    ],
)
def test_usage(capsys, argv, said):
    assert main(["bench", "--device", "cpu", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_what_torch_must_reach(capsys, found, monkeypatch):
    asked = found(rows())
    monkeypatch.undo()
    monkeypatch.setattr(
        machine, "machine", lambda ordinal: machine.Machine("a GPU", "", machine.Link(), 13000, "", None)
    )
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench"]) == 2
    assert "reaches no GPU; install a build with CUDA, or give --device cpu" in capsys.readouterr().err
    assert asked == []


@pytest.mark.slow
def test_without_torch():
    code = "import sys; sys.modules['torch'] = None; from kvplan.cli import main; sys.exit(main(sys.argv[1:]))"
    done = python("-c", code, "bench", "--device", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvplan: a bench needs torch; pip install torch\n"


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "\n  kvplan bench\n" in out
    assert max(map(len, out.splitlines())) <= 90

"""Baselines between two GPUs, acted by the CPU: each moves every byte, on the streams of the right GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvplan.errors import PathError, TransferError
from kvplan.measure import baselines, flights
from kvplan.measure.peers import nccl, peer_baselines
from kvplan.measure.workload import HOSTS, Buffers, Geometry, work

torch = pytest.importorskip("torch")
cpu_line = pytest.importorskip("tests.measure.cpu_line")


@pytest.fixture
def pair(monkeypatch):
    """``pair(peer)``: cuda:0 and its peer, with an NCCL of the CPU."""
    made = cpu_line.on_the_cpu(monkeypatch)
    library = cpu_line.Nccl()
    monkeypatch.setattr(nccl, "library", lambda: library)

    def opened(peer="cuda:1"):
        return made("cuda:0", peer)

    opened.library = library
    return opened


def test_the_names_are_those_that_are_made(pair):
    for peer in ("cuda:0", "cuda:1"):
        assert set(peer_baselines.makers(pair(peer))) == set(baselines.names("cuda:0", peer))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("route", "peer"), [("push", "cuda:1"), ("pull", "cuda:1"), ("device", "cuda:0")])
def test_they_move_every_byte(route, peer, host, pair):
    moved = work(Buffers(256 << 10, "cpu", 512 << 10), Geometry(route, host, 512, 240, 12))
    with pair(peer) as both:
        for name, make in peer_baselines.makers(both).items():
            baseline = make(moved)
            baseline.verify()
            assert baseline.begin().result().nbytes == moved.plan.nbytes, name
    if route == "device":
        assert pair.library.calls == []
        return
    assert pair.library.ordinals == [0, 1]
    assert pair.library.calls.count("ncclCommInitAll") == 1
    assert pair.library.calls.count("ncclCommDestroy") == 2
    assert pair.library.calls.count("ncclSend") == pair.library.calls.count("ncclRecv") == 2


@pytest.mark.parametrize("name", ["one large copy", "NCCL send/recv", "torch indexing"])
def test_bytes_that_do_not_arrive_are_seen(name, pair, monkeypatch):
    moved = work(Buffers(256 << 10, "cpu", 512 << 10), Geometry("push", "contiguous", 512, 240, 12))
    baseline = peer_baselines.makers(pair())[name](moved)
    monkeypatch.setattr(cpu_line.Pair, "enqueued", lambda self, nbytes, issue: flights.AtOnce(nbytes, lambda: None))
    with pytest.raises(TransferError, match=f"{name}: not every byte of "):
        baseline.verify()


def test_staging_memory_is_shared_and_grows(pair):
    both = pair()
    both.near.name = "cpu"
    staging = peer_baselines.Pair.staging
    small = staging(both, both.near, 64)
    assert (small.numel(), small.dtype) == (8, torch.int64)
    assert staging(both, both.near, 32).data_ptr() == small.data_ptr()
    assert staging(both, both.near, 1024).numel() == 128
    assert staging(both, both.near, 64).numel() == 8


def test_a_transfer_of_a_pair_waits_for_both_gpus_if_there_are_two(pair, monkeypatch):
    monkeypatch.setattr(peer_baselines, "Enqueued", lambda *given: given)
    for peer in ("cuda:0", "cuda:1"):
        both = pair(peer)
        far = both.far if peer == "cuda:1" else None
        assert peer_baselines.Pair.enqueued(both, 8, print) == (both.near, 8, print, far)


# What cannot be measured.


def test_gpus_that_do_not_reach_each_other_are_refused(pair, monkeypatch):
    closed = cpu_line.Line(name="cuda:1")
    closed.device.enable_peer = lambda ordinal: f"cuda:1 cannot reach the memory of cuda:{ordinal}: MIG"
    monkeypatch.setattr(peer_baselines, "Line", lambda name: closed if name == "cuda:1" else cpu_line.Line(name=name))
    with pytest.raises(PathError, match=r"^cuda:1 cannot reach the memory of cuda:0: MIG$"):
        pair()


def test_a_copy_for_each_of_many_runs_is_refused(pair, monkeypatch):
    monkeypatch.setattr(peer_baselines, "MOST_COPIES", 239)
    moved = work(Buffers(256 << 10, "cpu"), Geometry("push", "scattered", 512, 240, 12))
    with pytest.raises(PathError, match="it makes a copy for each run, and 240 runs are more than 239"):
        peer_baselines.makers(pair())[baselines.BATCH](moved)


def test_without_nccl_the_baseline_is_refused_each_time_and_looked_for_once(pair, monkeypatch):
    looked = []

    def library():
        looked.append(1)
        raise PathError("torch's NCCL cannot be called: libnccl.so.2: no such file")

    monkeypatch.setattr(nccl, "library", library)
    moved = work(Buffers(256 << 10, "cpu"), Geometry("push", "scattered", 512, 240, 12))
    with pair() as both:
        for _ in range(2):
            with pytest.raises(PathError, match=r"torch's NCCL cannot be called: libnccl\.so\.2"):
                peer_baselines.send(both, moved)
    assert looked == [1]


def test_an_nccl_that_does_not_start_is_refused(pair):
    pair.library.fails = "ncclCommInitAll"
    moved = work(Buffers(256 << 10, "cpu"), Geometry("push", "scattered", 512, 240, 12))
    with pair() as both, pytest.raises(PathError, match="NCCL does not start: ncclCommInitAll returned 3: internal"):
        peer_baselines.send(both, moved)
    assert "ncclCommDestroy" not in pair.library.calls


def test_a_send_that_fails_ends_its_group(pair):
    pair.library.fails = "ncclSend"
    with pair() as both, pytest.raises(TransferError, match="ncclSend returned 3: internal error"):
        both.communicators().send((0, 0, 7), (1, 0, 8), 8)
    assert pair.library.calls[-3:] == ["ncclGroupEnd", "ncclCommDestroy", "ncclCommDestroy"]


def test_a_library_without_its_calls_is_refused(monkeypatch):
    monkeypatch.setattr(nccl.ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(PathError, match=r"torch's NCCL cannot be called: .*ncclCommInitAll"):
        nccl.library()


# The events.


def test_work_of_both_gpus_lies_between_two_events_of_one(monkeypatch):
    """All calls in order, by stream: the peer waits for the start, and the end waits for the peer."""
    calls = []

    class Event:
        count = 0

        def __init__(self, enable_timing=False):
            self.name = "joined" if not enable_timing else "after" if Event.count else "before"
            Event.count += enable_timing

        def record(self, stream):
            calls.append((stream.name, "record", self.name))

    def stream(name):
        return SimpleNamespace(name=name, wait_event=lambda event: calls.append((name, "wait", event.name)))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    near, far = cpu_line.Line(), cpu_line.Line()
    near.stream, far.stream = stream("near"), stream("far")
    flights.Enqueued(near, 8, lambda: calls.append("issue"), far)
    assert calls == [
        ("near", "record", "before"), ("far", "wait", "before"), "issue",
        ("far", "record", "joined"), ("near", "wait", "joined"), ("near", "record", "after"),
    ]  # fmt: skip

"""Calibrating a wire: fits to known costs, lists and packed transfers by NIXL's double, and NIXL if installed."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Agent, KVLayout, TransferError
from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.cli import main
from kvplan.cost.wire import Crossing, default_wire, from_json, packed_cost
from kvplan.measure import wire_calibration as wires
from kvplan.measure.wire_calibration import BLOCK, BLOCKS, FAR, SLOTS, PackedTimes, Posted
from tests.nixl import double

NBYTES = 1 << 20


OVERLAPPING = (lambda n, b: 5e-6 + n * 4e-7, lambda n, b: 8e-6 + n * 1e-6 + b * 2e-11)
BY_CPU = (lambda n, b: 6e-6 + n * 3e-6 + b * 1e-10, lambda n, b: 6e-6 + n * 3e-6 + b * 1.1e-10)


@pytest.mark.parametrize(
    ("times", "overlaps", "costs"),
    [(OVERLAPPING, True, [5e-6, 4e-7, 1e-6, 2e-11]), (BY_CPU, False, [6e-6, 3e-6, 0, 1.1e-10])],
)
def test_it_finds_the_costs_of_a_wire(times, overlaps, costs):
    cases, rng = list(itertools.product((1, 16, 256, 4096), (512, 8192, 65536))), np.random.default_rng(0)
    found = wires.fitted_wire(default_wire(), [Posted(n, b, *(time(n, n * b) for time in times)) for n, b in cases])
    assert found.overlaps == overlaps
    assert [found.post, found.descriptor, found.message, found.byte] == pytest.approx(costs)
    noisy = [Posted(n, b, *(rng.uniform(0.5, 2.0) * time(n, n * b) for time in times)) for n, b in cases]
    found = wires.fitted_wire(default_wire(), noisy)
    assert min(found.post, found.descriptor, found.message, found.byte) >= 0
    assert from_json(found.to_json()) == found


# ---- lists -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    for name, value in {"NBYTES": NBYTES, "SIZES": (512, 4096, 65536), "COUNTS": (1, 16, 64), "SAMPLES": 2,
                        "SLOT_SIZES": (1 << 16, 1 << 18), "PINGS": 10, "WARM_PINGS": 2, "SHORT_SAMPLES": 2,
                        "LONG_SAMPLES": 2, "REST_SECONDS": 0.0}.items():  # fmt: skip
        monkeypatch.setattr(wires, name, value)


@pytest.fixture
def ends(small):
    """Two ends in one process: NIXL is its double, and a clock counts its looks."""
    network, ticks = double.Network(), itertools.count()
    memory = [wires.Memory("cpu", NBYTES) for _ in range(2)]
    near, far = (NixlEnd(name, {"pool": one.layout}, double.Agent(network, name), ("UCX",), progress_thread=False)
                 for name, one in zip(("near end", FAR), memory, strict=True))  # fmt: skip
    near.open()
    near.add(FAR, far.metadata())
    made = wires.WireEnds(near, memory[0], memory[1].address, clock=lambda: next(ticks) * 1e-6)
    made.network, made.memory = network, memory
    yield made
    assert not near.nixl.live, "a handle of NIXL is left"
    near.close()
    far.close()


def test_a_list_moves_its_bytes(ends):
    mine, theirs = ends.memory
    for operation, source, target in (("WRITE", mine, theirs), ("READ", theirs, mine)):
        ctypes.memset(source.address, 7, NBYTES)
        ctypes.memset(target.address, 0, NBYTES)
        post, seconds = ends.post(16, 512, operation)
        assert 0 < post < seconds
        assert ctypes.string_at(target.address, NBYTES).count(7) == 16 * 512


@pytest.mark.parametrize("call", ["make", "post", "look", "err"])
def test_a_failure_of_nixl_is_a_transfer_s(ends, call):
    ends.network.failures = [call]
    with pytest.raises(TransferError, match=r"NIXL (cannot move a list of 16 descriptors|says 'ERR' of a list of 16)"):
        ends.post(16, 512, "WRITE")


# ---- packed transfers: the cost of kvplan's own protocol ---------------------------------------------------------


def seconds(wire):
    """The times that the model of a wire gives for small slots."""
    wire = replace(wire, slot_nbytes=SLOTS[1])
    short, long = Crossing(BLOCK, 1, 1, 1, 1), Crossing(BLOCKS * BLOCK, BLOCKS, BLOCKS, BLOCKS, BLOCKS)
    return [
        PackedTimes(*(packed_cost(one, wire, pull=pull).seconds for one in (short, long)), short, long, pull)
        for pull in (True, False)
    ]


@given(
    memory=st.sampled_from(["DRAM", "VRAM"]), overlaps=st.booleans(), chunk=st.floats(1e-6, 1e-3),
    start=st.floats(0.0, 1e-2), latency=st.floats(0.0, 1e-4),
)  # fmt: skip
def test_a_model_takes_as_long_as_what_was_measured(memory, overlaps, chunk, start, latency):
    wire = replace(default_wire(memory), overlaps=overlaps, latency=latency, chunk=chunk, start=start)
    known = seconds(wire)
    found = wires.with_protocol(replace(wire, chunk=0.0, start=0.0), known)
    for mine, theirs in zip(seconds(found), known, strict=True):
        assert (mine.one, mine.many) == pytest.approx((theirs.one, theirs.many))
    assert from_json(found.to_json()) == found


def test_pulls_and_pushes_are_timed(small):
    network, ticks = double.Network(), itertools.count()
    me, you = (
        Agent(name, {"pool": KVLayout.from_tensors("block dim", np.full((BLOCKS, BLOCK), 7, np.uint8))}, slots=SLOTS,
              transports=("nixl",), agent=double.Agent(network, name), progress="thread") for name in ("me", "you")
    )  # fmt: skip
    with me, you:
        peer = me.meet(you.card())
        found = wires.packed_times(peer, me.layouts["pool"], peer.layouts["pool"], clock=lambda: next(ticks) * 1.0)
        assert [(one.pull, one.one, one.many) for one in found] == [(True, 1.0, 1.0), (False, 1.0, 1.0)]  # a tick each
        for one in found:
            assert (one.few.nbytes, one.all.nbytes) == (BLOCK, BLOCKS * BLOCK)
            assert packed_cost(one.all, replace(default_wire(), slot_nbytes=SLOTS[1])).messages == wires.CHUNKS
        assert (me.stats().nbytes, set(me.stats().paths)) == (2 * (3 * BLOCKS + 2) * BLOCK, {"packed"})


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_profile_is_saved_where_agents_look(monkeypatch, tmp_path, capsys):
    profile = replace(default_wire("DRAM"), wire="UCX over tcp", how="calibrated", note="")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(wires, "calibrate_wire", lambda device, tell: (profile, [Posted(1, 512, 1e-6, 2e-6)]))
    assert main(["calibrate", "--wire"]) == 0
    out, err = capsys.readouterr()
    path = tmp_path / "kvplan" / "profiles" / "wire_ucx-over-tcp_dram.json"
    assert "UCX over tcp" in out
    assert f"saved {path}" in err
    assert from_json(path.read_text()) == profile


@pytest.mark.slow
def test_nixl_itself(small, monkeypatch):
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'kvplan[nixl]'")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    profile, found = wires.calibrate_wire("cpu", seconds=1.0)
    assert (profile.wire, profile.memory, profile.how) == ("UCX over tcp,self", "DRAM", "calibrated")
    assert profile.byte > 0
    assert profile.latency > 0
    assert len(found) == len({one[:2] + one[4:] for one in found})
    assert from_json(profile.to_json()) == profile

"""Calibrating a wire: fits to known costs, lists through NIXL's double, and through NIXL itself if installed."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvplan import TransferError
from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.cli import main
from kvplan.cost.wire import default_wire, from_json
from kvplan.measure import wire_calibration, wire_posts
from kvplan.measure.wire_calibration import calibrate_wire, fitted_wire
from kvplan.measure.wire_posts import FAR, PING, PONG, Memory, Posted, WireEnds
from tests.nixl import double

SIZES, COUNTS = (512, 4096, 65536), (1, 16, 64)
NBYTES = 1 << 20


# ---- the fit -----------------------------------------------------------------------------------------------------


def lists(post, seconds):
    return [Posted(n, b, post(n, n * b), seconds(n, n * b)) for n in (1, 16, 256, 4096) for b in (512, 8192, 65536)]


def test_it_finds_the_costs_of_a_wire_that_overlaps():
    known = lists(lambda n, b: 5e-6 + n * 4e-7, lambda n, b: 8e-6 + n * 1e-6 + b * 2e-11)
    found = fitted_wire(default_wire(), known)
    assert found.overlaps
    assert [found.post, found.descriptor, found.message, found.byte] == pytest.approx([5e-6, 4e-7, 1e-6, 2e-11])


def test_it_finds_that_the_cpu_moves_the_bytes():
    known = lists(lambda n, b: 5e-6 + n * 3e-6 + b * 1e-10, lambda n, b: 6e-6 + n * 3e-6 + b * 1.1e-10)
    found = fitted_wire(default_wire("DRAM"), known)
    assert not found.overlaps
    assert [found.post, found.descriptor, found.message, found.byte] == pytest.approx([6e-6, 3e-6, 0, 1.1e-10])


def test_noise_does_not_make_a_negative_cost():
    rng = np.random.default_rng(0)
    known = [
        replace_times(one, rng.uniform(0.5, 2.0)) for one in lists(lambda n, b: 1e-5, lambda n, b: 1e-5 + b * 1e-10)
    ]
    found = fitted_wire(default_wire(), known)
    assert min(found.post, found.descriptor, found.message, found.byte) >= 0
    assert from_json(found.to_json()) == found


def replace_times(one, factor):
    return one._replace(post=one.post * factor, seconds=one.seconds * factor)


# ---- lists -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(wire_posts, "NBYTES", NBYTES)
    monkeypatch.setattr(wire_posts, "SIZES", SIZES)
    monkeypatch.setattr(wire_posts, "COUNTS", COUNTS)
    monkeypatch.setattr(wire_posts, "SLOT_SIZES", (1 << 16, 1 << 18))
    monkeypatch.setattr(wire_posts, "SAMPLES", 2)
    monkeypatch.setattr(wire_posts, "PINGS", 10)
    monkeypatch.setattr(wire_posts, "WARM_PINGS", 2)


@pytest.fixture
def ends(small):
    """Two ends in one process: NIXL is its double, and a clock counts its looks."""
    network, ticks = double.Network(), itertools.count()
    memory = [Memory("cpu", NBYTES) for _ in range(2)]
    near, far = (NixlEnd(name, {"pool": one.layout}, double.Agent(network, name), ("UCX",), progress_thread=False)
                 for name, one in zip(("near end", FAR), memory, strict=True))  # fmt: skip
    near.open()
    far.open()
    near.add(FAR, far.metadata())
    far.add("near end", near.metadata())

    def tell(note):
        assert note == PING
        far.nixl.send_notif("near end", PONG)

    made = WireEnds(near, memory[0], memory[1].address, 0, tell, clock=lambda: next(ticks) * 1e-6)
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


# ---- the command -------------------------------------------------------------------------------------------------

FOUND = lists(lambda n, b: 5e-6 + n * 4e-7, lambda n, b: 8e-6 + n * 1e-6 + b * 2e-11)
PROFILE = replace(fitted_wire(default_wire("DRAM"), FOUND), wire="UCX over tcp", how="calibrated", note="")


@pytest.fixture
def calibrated(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(wire_calibration, "calibrate_wire", lambda device, tell: (PROFILE, FOUND))
    return tmp_path / "kvplan" / "profiles" / "wire_ucx-over-tcp_dram.json"


def test_the_profile_is_saved_where_agents_look(calibrated, capsys):
    assert main(["calibrate", "--wire"]) == 0
    out, err = capsys.readouterr()
    assert "UCX over tcp" in out
    assert f"saved {calibrated}" in err
    assert from_json(calibrated.read_text()) == PROFILE


@pytest.mark.slow
def test_nixl_itself(small, monkeypatch):
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'kvplan[nixl]'")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    profile, found = calibrate_wire("cpu", seconds=1.0)
    assert (profile.wire, profile.memory, profile.how) == ("UCX over tcp,self", "DRAM", "calibrated")
    assert profile.byte > 0
    assert profile.latency > 0
    assert len(found) == len({one[:2] + one[4:] for one in found})
    assert from_json(profile.to_json()) == profile

"""Two processes in namespaces of their own, as two containers of one machine, with a folder that both mount."""

from __future__ import annotations

import functools
import re
import subprocess
import time

import pytest

from kvplan import KVPlanError, PathError
from tests.contract.peers.pairs import FAR, NEAR, Pair
from tests.contract.peers.transports import TRANSPORTS, over

BOUND = 30.0  # seconds within which a death is noticed
OWN = ["--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--ipc", "--uts", "--mount"]
MOUNTED = 'mount --bind "$0" "$1" && shift && exec "$@"'
HELP = "set KVPLAN_SOCKETS to a folder that both containers share"


@functools.cache
def unshare():
    """The command that starts a process in namespaces of its own, as number 1; skip where nobody may do so."""
    said = ""
    for command in (["unshare", "--user", "--map-root-user", *OWN], ["unshare", *OWN]):
        try:
            done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=20, check=False)
        except FileNotFoundError:
            return None, "there is no unshare (util-linux)"
        if done.returncode == 0:
            return command, ""
        said = done.stderr.strip()
    return None, f"this machine allows no namespaces: {said}"


@pytest.fixture
def contained(start, tmp_path):
    """A function that starts a process in a container, where the shared folder is mounted under another name."""
    command, why = unshare()
    if command is None:
        pytest.skip(why)
    shared = tmp_path / "shared"
    shared.mkdir()

    def begin(*more, name=None, pod=False):
        if name is None:
            return start(*(kind for kind in command if kind != "--net" or not pod), *more)
        (tmp_path / name).mkdir()
        mount = ["sh", "-c", MOUNTED, str(shared), str(tmp_path / name)]
        return start(*command, *mount, *more, KVPLAN_SOCKETS=str(tmp_path / name))

    begin.shared = shared
    return begin


def check_moves(pair):
    """Move blocks both ways with a note, and compare every byte of both."""
    pair.move([1, 2, 5], [3, 4, 0], reading=False, note=b"there")
    assert pair.far.hear(1) == [("near", b"there")]
    pair.move([7, 8], [3, 9], reading=True, note=b"taken")
    assert pair.far.hear(1) == [("near", b"taken")]
    pair.check()


def check_deaths(pair):
    """Kill the owner while a transfer waits: it ends in an error in time, and nothing more is sent."""
    number = pair.submit([0], [0], reading=True, event=1)
    pair.far.kill()
    begun = time.monotonic()
    for attempt in (lambda: pair.near.end(number, BOUND), lambda: pair.near.send("far", b"more")):
        with pytest.raises(KVPlanError, match=r"'far'"):
            attempt()
    assert time.monotonic() - begun < BOUND
    pair.near.close(BOUND)


@pytest.mark.parametrize("who", ["both", "owner", "visitor"])
def test_host_pools(contained, start, who):
    def process(name, alone):
        if who in ("both", alone):
            return contained(name=name)
        return start(KVPLAN_SOCKETS=str(contained.shared))

    pair = Pair(TRANSPORTS["shm"], process("decode", "visitor"), process("prefill", "owner"))
    check_moves(pair)
    check_deaths(pair)


def test_host_pools_of_a_pod(contained):
    """Its containers share the network, and need no folder."""
    pair = Pair(TRANSPORTS["shm"], contained(pod=True), contained(pod=True))
    check_moves(pair)
    check_deaths(pair)


def test_an_owner_notices_the_death_of_a_visitor(contained):
    pair = Pair(TRANSPORTS["shm"], contained(name="decode"), contained(name="prefill"))
    check_moves(pair)
    pair.near.kill()
    pair.far.close(BOUND)  # it waits until nobody uses the memory
    assert not list(contained.shared.glob("kvplan-*"))[1:], "more than the socket of the process that was killed"


def test_without_a_shared_folder(contained, start, folder):
    owner, visitor = contained(), start()
    with pytest.raises(PathError, match=rf"'far' runs in another container; {HELP}, in both"):
        Pair(TRANSPORTS["shm"], visitor, owner)
    for process in (owner, visitor):
        process.close()
    owner = contained(name="prefill")
    with pytest.raises(PathError, match=rf"'far' listens in a folder, and KVPLAN_SOCKETS is not set here; {HELP}"):
        Pair(TRANSPORTS["shm"], visitor, owner)
    other = start(KVPLAN_SOCKETS=str(folder))
    owner.close()
    with pytest.raises(PathError, match=rf"{re.escape(str(folder))}.* is not the folder where 'far' listens; {HELP}"):
        Pair(TRANSPORTS["shm"], other, owner)


GPU = over("cuda_ipc")
ANOTHER_NUMBER = ["sh", "-c", 'true & true & true & wait; "$@"; exit $?', "sh"]  # the shell is number 1


@GPU
def test_caches_of_a_gpu(contained, transport):
    pair = Pair(transport, contained(*ANOTHER_NUMBER, name="decode"), contained(name="prefill"))
    check_moves(pair)
    check_deaths(pair)


@GPU
def test_handles_of_a_gpu_between_equal_numbers(contained, transport):
    with pytest.raises(PathError, match=r"both have the number 1 .*docker run --init.*expandable_segments:True"):
        Pair(transport, contained(name="decode"), contained(name="prefill"))


@GPU
def test_pieces_of_a_gpu_between_equal_numbers(contained, transport, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    pair = Pair(transport, contained(name="decode"), contained(name="prefill"), (NEAR, FAR))
    check_moves(pair)
    check_deaths(pair)

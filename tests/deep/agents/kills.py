"""Owners and visitors that are killed at random moments while blocks move."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import numpy as np

import kvplan
from kvplan import Agent, KVLayout, TransferError
from tests.deep.agents.places import SECONDS, Bytes, Host, Neighbour, neighbours, settled

FLYING = 3  # transfers in flight at a time
MOVED = 4  # blocks of each
SOON = 0.05  # seconds within which the other process is killed


def rounds(place: Host, seed: int, count: int) -> None:
    """Kill owners and visitors."""
    rng = random.Random(seed)
    kinds = 2 * place.turns
    left = (0, 0, 0)
    finished = failed = noted = 0
    seeds = [k % 251 for k in range(count)]
    for k, other in enumerate(neighbours(place, seeds, ahead=place.ahead)):
        mine = place.pool((k + 1) % 251)
        agent = place.agent("me", {"kv": mine})
        if (k + seed) // place.turns % 2:
            ended, broken = _killed_owner(place, rng, agent, other, place.content(seeds[k]))
            finished, failed = finished + ended, failed + broken
        else:
            noted += _killed_visitor(place, rng, agent, other, (mine, place.content(seeds[k])))
        agent.close(timeout=SECONDS)
        other.end()
        del agent, mine, other
        if k < kinds:  # each kind has run once
            left = place.left()
        settled(place, left)
        if k % 20 == 19:
            print(f"  {k + 1} rounds, {finished} transfers done, {failed} failed, {noted} noted", flush=True)
    assert count < 20 or failed, "no transfer was in flight when its owner was killed"


def _killed_owner(place: Host, rng: random.Random, agent: Agent, other: Neighbour, told: Bytes) -> tuple[int, int]:
    """Read from an owner until it is killed; return how many transfers were called done, and how many failed."""
    peer = agent.meet(other.card())
    into = place.pool(0, "layer block dim")
    load = kvplan.compile(peer.layouts["kv"], into)
    killer = threading.Timer(rng.random() * SOON, other.kill)
    killer.start()
    finished = failed = 0
    until = time.monotonic() + SECONDS
    while not failed:
        assert time.monotonic() < until, "the death was never noticed"
        place.clear(into)
        src, dst = (rng.sample(range(place.extents[0]), FLYING * MOVED) for _ in range(2))
        flying: list[Any] = []
        try:
            flying.extend(
                peer.submit(load.plan(src[k : k + MOVED], dst[k : k + MOVED]), note=b"x")
                for k in range(0, FLYING * MOVED, MOVED)
            )
        except TransferError as error:
            failed += _is_death(error)
        done = [_done(transfer) for transfer in flying]
        seen = place.seen(into)
        for k, right in enumerate(done):
            if right:
                mine = slice(k * MOVED, (k + 1) * MOVED)
                np.testing.assert_array_equal(seen[dst[mine]], told[src[mine]])
        finished, failed = finished + sum(done), failed + len(done) - sum(done)
    killer.join()
    try:
        peer.submit(load.plan([0], [0]))
    except TransferError:
        return finished, failed
    raise AssertionError("a transfer with a dead peer was accepted")


def _done(transfer: Any) -> bool:
    try:
        transfer.synchronize(SECONDS)
    except TransferError as error:
        return not _is_death(error)
    return True


def _is_death(error: TransferError) -> bool:
    """Return True; raise the error if it is not of the owner's death."""
    if "with 'other'" not in str(error) and "from 'other'" not in str(error):
        raise error
    return True


def _killed_visitor(
    place: Host, rng: random.Random, agent: Agent, other: Neighbour, pools: tuple[KVLayout, Bytes]
) -> int:
    """Let a visitor write until it is killed; return the number of its notes. The owner then closes at once."""
    mine, theirs = pools
    blocks = place.extents[0]
    other.meet(agent.card())
    killer = threading.Timer(rng.random() * SOON, other.kill)
    killer.start()
    for k in range(1_000_000):
        try:
            other.push([k % blocks], [(k + 1) % blocks], b"%d" % k)
        except (EOFError, OSError):
            break
    killer.join()
    heard = [int(note) for _, note in agent.notes()]
    assert heard == list(range(len(heard))), "notes came twice, or out of order"
    seen = place.seen(mine)
    for k in heard[-blocks:]:
        np.testing.assert_array_equal(seen[(k + 1) % blocks], theirs[k % blocks])
    gc.collect()
    return len(heard)

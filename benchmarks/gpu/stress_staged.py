"""Hunts for staged transfers that lose bytes: ``python -m benchmarks.gpu.stress_staged --minutes 4 --others``.

Before each transfer the ring is filled with 0xEE, and what may become its header with zeros: nothing stale can look
right. ``--same`` verifies the second of two equal transfers instead (same slots, bytes and header); ``--streams 1``
does without the second kernel stream; ``--single`` without the driver's batch; ``--others`` lets other executors move
the same in between. What is wrong is told: which run and stream, whether it was left as it was, and what the ring, the
header and the run table hold; and how often a wait on the CPU came back before its event had passed.
"""

import argparse
import ctypes
import os
import sys
import time
from collections import Counter

import numpy as np
import torch

from benchmarks.gpu.environment import CONNECTIONS, MOST_CONNECTIONS
from kvplan.cost.policy import Policy
from kvplan.cuda.device import NOT_READY, SUCCESS
from kvplan.execute.executor import Executor
from kvplan.execute.gpu.by_layer.ring import granules_of
from kvplan.execute.gpu.shape import cut
from kvplan.execute.gpu.staged import StagedPath
from kvplan.measure.workload import Buffers, Geometry, work
from kvplan.plan.staging import staging_of

seen = {}
returns = Counter()  # of waits on the CPU: how they came back


def watch_waits(driver):
    """Note what a wait on an event returned, and whether the event had passed then: the executor asks later."""
    whole = driver.cuEventSynchronize

    def wait(event):
        code = whole(event)
        passed = driver.cuEventQuery(event)
        returns["passed" if (code, passed) == (SUCCESS, SUCCESS) else f"returned {code}, then the query {passed}"] += 1
        if passed == NOT_READY:
            print(f"EARLY: cuEventSynchronize returned {code} before its event had passed", flush=True)
        return code

    driver.cuEventSynchronize = wait


def watch():
    """Note where a transfer begins in the ring, its pieces, and whether the lane's own thread issues it."""
    whole = StagedPath._prepare_part

    def prepare(self, transfer, part, skips, plan, seams, lane):
        held, ring = len(transfer._pieces), self._rings.get(plan.direction)
        first = ring.next if ring else 0
        made = whole(self, transfer, part, skips, plan, seams, lane)
        seen.update(
            ring=self._rings[plan.direction],
            group=part.group,
            thread=transfer._issued is not None,
            pieces=[piece for _, piece in transfer._pieces[held:] if piece.nbytes < 1 << 24],
        )
        seen["first"] = first if seen["ring"] is ring else 0
        return made

    StagedPath._prepare_part = prepare


def fill(address, byte, nbytes):
    assert not ctypes.CDLL("libcuda.so.1").cuMemsetD8_v2(
        ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(nbytes)
    )


def read(address, nbytes):
    out, copy = np.empty(nbytes, np.uint8), ctypes.CDLL("libcuda.so.1").cuMemcpyDtoH_v2
    assert not copy(ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
    return out.view(np.int64)


def poison(backend, direction):
    ring = backend.paths["staged"]._rings.get(direction)
    if ring:
        fill(ring.piece.address, 0xEE, ring.slots * ring.slot_nbytes)
    for _, piece in [held for free in list(backend.resources.memory._free.values()) for held in list(free)]:
        if piece.nbytes <= 1 << 16:
            fill(piece.address, 0, piece.nbytes)  # a header of zeros copies nothing


def report(one, tables, moved, later, expected, before):
    """Which bytes are wrong, and what they, the ring, the header and the run table hold. All (run, unit, word)."""
    n, ring, first, load = one.geometry, seen["ring"], seen["first"], one.geometry.direction == "load"
    wrong, again = (moved != expected).any(-1), (later == expected).all(-1)
    left, poisoned = (moved == before).all(-1), (moved == -0x1111111111111112).any(-1)
    staging = staging_of(seen["group"], n.direction)
    granules = granules_of(n.nbytes, staging.nbytes, ring.slot_nbytes)
    print(f"WRONG: {n}, lane's thread {seen['thread']}, {granules} units a chunk, first slot {first} of {ring.slots}")
    print(
        f"  {int(wrong.sum())} runs: {int((wrong & left).sum())} untouched, {int((wrong & poisoned).sum())} of the"
        f" ring's poison, {int((wrong & again).sum())} RIGHT WHEN LOOKED AT AGAIN (it ended early)"
    )
    if load:
        words = 8 * -(-n.blocks // granules) + 2 * n.blocks
        same = read(seen["pieces"][-1].address, 8 * words) == seen["pieces"][0].words[:words]
        print(f"  header and units on the GPU as sent: {bool(same.all())}")
    for table in tables._known.get(seen["group"], {}).values():
        items = cut(staging.runs if load else staging.runs[[1, 0, 2]], table.shape.width)
        print(f"  run table as made: {bool((read(table.words[5], items.nbytes) == items.ravel()).all())} {table.shape}")
    places = staging.runs[0][np.argsort(staging.runs[1], kind="stable")]
    known = {word: at for at, word in enumerate(expected[..., 0].flatten().tolist())}
    for unit in wrong.any(0).nonzero().flatten().tolist()[:24]:
        chunk = unit // granules
        for run in wrong[:, unit].nonzero().flatten().tolist()[:4]:
            off = (moved[run, unit] != expected[run, unit]).nonzero().flatten()
            place = (
                ring.piece.address + (first + chunk) % ring.slots * ring.slot_nbytes + unit % granules * staging.nbytes
            )
            in_ring = torch.from_numpy(read(place + int(places[run]), n.run_nbytes))
            from_ = known.get(int(moved[run, unit, 0]))
            what = (
                "untouched"
                if left[run, unit]
                else "ring's poison"
                if poisoned[run, unit]
                else "garbage within"
                if from_ is None or int(off[0])
                else f"unit {from_ % n.blocks} run {from_ // n.blocks}"
            )
            stream = "other" if load and chunk % 2 else "kernel"
            now = held_by(in_ring, expected[run, unit].cpu(), known, n)
            if chunk + ring.slots <= (n.blocks - 1) // granules:
                now = "taken by a later chunk"
            print(
                f"    unit {unit} run {run} chunk {chunk} stream {stream} bytes"
                f" {8 * int(off[0])}..{8 * int(off[-1]) + 8} ({off.numel()} words): {what}; ring now {now}"
            )


def held_by(there, wanted, known, n):
    """Describe the bytes at a run's place in the ring, and where they come from."""
    off = (there != wanted).nonzero().flatten()
    if not off.numel():
        return "right"
    poison = int((there[off] == -0x1111111111111112).sum())
    other = known.get(int(there[0]))
    whose = ""
    if other is not None and int(off[0]) == 0:
        whose = f", begins as unit {other % n.blocks} run {other // n.blocks}"
    first, last = 8 * int(off[0]), 8 * int(off[-1]) + 8
    return f"WRONG in bytes {first}..{last}, {off.numel()} words, {poison} of them never written{whose}"


def check(executor, one, same, pool):
    """One transfer, or the second of two equal ones as the benchmark has it; whether all arrived.

    ``pool`` is the host's bytes on the GPU, which loads leave as they are: gathering there is much faster.
    """
    n, (src, dst) = one.geometry, (torch.from_numpy(ids).to(one.device) for ids in (one.src_ids, one.dst_ids))
    if same:
        executor.submit(one.plan).synchronize()
    source = (
        one.src
        if n.direction == "store" or pool is None
        else one.src._replace(parts=(pool[: one.src.parts[0].numel()],))
    )
    expected = source.select(src, n.block_runs).contiguous()
    one.dst.parts[0].bitwise_not_()
    before = one.dst.select(dst, n.block_runs).contiguous()
    if not same:
        poison(executor._backend, n.direction)
    torch.cuda.synchronize()
    executor.submit(one.plan).synchronize()
    moved = one.dst.select(dst, n.block_runs).contiguous()
    if torch.equal(moved, expected):
        return True
    time.sleep(0.2)
    torch.cuda.synchronize()
    tables = executor._backend.resources.tables
    report(one, tables, moved, one.dst.select(dst, n.block_runs).contiguous(), expected, before)
    return False


def main(arguments=None):
    ask = argparse.ArgumentParser()
    for name, kind, value in (
        ("minutes", float, 4.0), ("streams", int, None), ("runs", int, 8192), ("stop", int, 5), ("vary", int, 20),
        ("sizes", str, "16384,16384,8192,28672,65536"), ("directions", str, "load"),
        ("hosts", str, "contiguous,scattered"),
    ):  # fmt: skip
        ask.add_argument(f"--{name}", type=kind, default=value)
    ask.add_argument("--same", action="store_true", help="as the benchmark: the second of two equal transfers")
    ask.add_argument("--others", action="store_true", help="other paths' executors move the same in between")
    ask.add_argument("--single", action="store_true", help="one call of the driver a copy, no batches")
    a = ask.parse_args(arguments)
    os.environ.setdefault(CONNECTIONS, MOST_CONNECTIONS)  # as the run had it that lost bytes
    watch()
    buffers, failed, count, ways = Buffers(1 << 30, "cuda:0"), 0, 0, a.directions.split(",")
    pool = None if "store" in ways else buffers.host.to("cuda:0").view(torch.int64)
    executor = Executor("cuda:0", Policy(path="staged", streams=a.streams))
    others = (
        [Executor("cuda:0", Policy(path=p)) for p in ("kernel", "copy_engine", "copy_engine_2d", "auto")]
        if a.others
        else []
    )
    watch_waits(executor._backend.resources.device.driver)
    if a.single:
        executor._backend.resources.device.driver.cuMemcpyBatchAsync = None
    tried, lost = Counter(), Counter()
    for way in ways:  # the ring grows to slots of 64 MiB first, as in the benchmark
        check(executor, work(buffers, Geometry(way, "contiguous", 1 << 20, 128, 64)), a.same, pool)
    until = time.time() + 60 * a.minutes
    for size, way, host in ((s, w, h) for _ in range(1 << 20) for s in map(int, a.sizes.split(",")) for w in ways
                            for h in a.hosts.split(",")):  # fmt: skip
        if time.time() > until or failed >= a.stop:
            break
        runs = a.runs - 64 * (count // 10 % a.vary)  # other programs, so that run tables are new, and old ones dropped
        one, count = work(buffers, Geometry(way, host, size, runs, 64), count), count + 1
        for each in others:
            each.submit(one.plan).synchronize()
        right = check(executor, one, a.same, pool)
        failed += not right
        tried[way, host, size] += 1
        lost[way, host, size] += not right
    for what, times in sorted(tried.items()):
        print(f"  {what}: {times} transfers, {lost[what]} wrong")
    print(f"{count} transfers, {failed} wrong; waits: {dict(returns)}; {sys.argv[1:]}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

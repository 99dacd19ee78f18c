"""Hunts for staged transfers that lose bytes: ``python -m benchmarks.gpu.stress_staged --minutes 4 --others``.

Before each transfer the ring is filled with 0xEE, and what may become its header with zeros: nothing stale can look
right. ``--same`` verifies the second of two equal transfers instead (same slots, bytes and header); ``--streams 1``
does without the second kernel stream; ``--others`` lets other executors move the same in between. What is wrong is
told: which run and stream, whether it was left as it was, and what the ring, the header and the run table hold.
"""

import argparse
import ctypes
import sys
import time

import numpy as np
import torch

from kvplan.execute import Executor
from kvplan.execute.policy import SMALL_CHUNK_NBYTES, SMALL_CHUNKS, Policy
from kvplan.execute.shape import cut
from kvplan.execute.staged import StagedPath
from kvplan.tune.workload import Buffers, Geometry, work

seen = {}


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


def poison(runtime, direction):
    ring = runtime.staged._rings.get(direction)
    if ring:
        fill(ring.piece.address, 0xEE, ring.slots * ring.slot_nbytes)
    for piece in [
        piece for free in list(runtime.memory._free.values()) for piece in list(free) if piece.nbytes <= 1 << 16
    ]:
        fill(piece.address, 0, piece.nbytes)  # a header of zeros copies nothing


def report(one, runtime, moved, later, expected, before):
    """Which bytes are wrong, and what they, the ring, the header and the run table hold. All (run, unit, word)."""
    n, ring, first, load = one.geometry, seen["ring"], seen["first"], one.geometry.direction == "load"
    wrong, again = (moved != expected).any(-1), (later == expected).all(-1)
    left, poisoned = (moved == before).all(-1), (moved == -0x1111111111111112).any(-1)
    staging = runtime.staging(seen["group"], n.direction)
    granules = max(1, min(ring.slot_nbytes, max(n.nbytes // SMALL_CHUNKS, SMALL_CHUNK_NBYTES)) // staging.nbytes)
    print(f"WRONG: {n}, lane's thread {seen['thread']}, {granules} units a chunk, first slot {first} of {ring.slots}")
    print(
        f"  {int(wrong.sum())} runs: {int((wrong & left).sum())} untouched, {int((wrong & poisoned).sum())} of the"
        f" ring's poison, {int((wrong & again).sum())} RIGHT WHEN LOOKED AT AGAIN (it ended early)"
    )
    if load:
        words = 8 * -(-n.blocks // granules) + 2 * n.blocks
        same = read(seen["pieces"][-1].address, 8 * words) == seen["pieces"][0].words[:words]
        print(f"  header and units on the GPU as sent: {bool(same.all())}")
    for table in runtime.tables._known.get(seen["group"], {}).values():
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
            held = torch.from_numpy(read(place + int(places[run]), n.run_nbytes))
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
            now = "right" if bool((held == expected[run, unit].cpu()).all()) else "WRONG"
            print(
                f"    unit {unit} run {run} chunk {chunk} stream {stream} bytes"
                f" {8 * int(off[0])}..{8 * int(off[-1]) + 8} ({off.numel()} words): {what}; ring now {now}"
            )


def check(executor, one, same):
    """One transfer, or the second of two equal ones as the benchmark has it; whether all arrived."""
    n, (src, dst) = one.geometry, (torch.from_numpy(ids).to(one.device) for ids in (one.src_ids, one.dst_ids))
    if same:
        executor.submit(one.plan).synchronize()
    expected = one.src.select(src, n.block_runs).contiguous()
    one.dst.flat.bitwise_not_()
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
    report(one, executor._backend, moved, one.dst.select(dst, n.block_runs).contiguous(), expected, before)
    return False


def main():
    ask = argparse.ArgumentParser()
    for name, kind, value in (
        ("minutes", float, 4.0), ("streams", int, None), ("runs", int, 8192), ("stop", int, 5), ("vary", int, 20),
        ("sizes", str, "16384,16384,8192,28672,65536"), ("directions", str, "load"),
    ):  # fmt: skip
        ask.add_argument(f"--{name}", type=kind, default=value)
    ask.add_argument("--same", action="store_true", help="as the benchmark: the second of two equal transfers")
    ask.add_argument("--others", action="store_true", help="other paths' executors move the same in between")
    a = ask.parse_args()
    watch()
    buffers, failed, count, ways = Buffers(1 << 30, "cuda:0"), 0, 0, a.directions.split(",")
    executor = Executor("cuda:0", Policy(path="staged", streams=a.streams))
    others = (
        [Executor("cuda:0", Policy(path=p)) for p in ("kernel", "copy_engine", "copy_engine_2d")] if a.others else []
    )
    for way in ways:  # the ring grows to slots of 64 MiB first, as in the benchmark
        check(executor, work(buffers, Geometry(way, "contiguous", 1 << 20, 128, 64)), a.same)
    until = time.time() + 60 * a.minutes
    for size, way, host in ((s, w, h) for _ in range(1 << 20) for s in map(int, a.sizes.split(",")) for w in ways
                            for h in ("contiguous", "scattered")):  # fmt: skip
        if time.time() > until or failed >= a.stop:
            break
        runs = a.runs - 64 * (count // 10 % a.vary)  # other programs, so that run tables are new, and old ones dropped
        one, count = work(buffers, Geometry(way, host, size, runs, 64), count), count + 1
        for each in others:
            each.submit(one.plan).synchronize()
        failed += not check(executor, one, a.same)
    print(f"{count} transfers, {failed} wrong; {sys.argv[1:]}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

"""Law 8: a transfer by layer that is written in one call makes the calls of its pieces, prepared one by one."""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvplan
from kvplan.cuda.call_list import BATCH, COPY, LAUNCH, RECORD, WAIT, Segment
from kvplan.execute.gpu.by_layer.kernel_layers import KernelLayers
from kvplan.execute.gpu.by_layer.staged_layers import StagedLayers
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.resources import Limits
from kvplan.plan.layers import cuts_of, split_layers
from kvplan.plan.staging import staging_of
from tests.paged_caches import Move, Paged
from tests.profiles import examples
from tests.simulated import Device, Stream
from tests.simulated.executors import TIGHT, OnDevice, executor_on, pair_on
from tests.simulated.kernel import words

HOSTS = ("block layer kv token head dim", "layer block kv token head dim", "block kv layer token head dim",
         "block token layer kv head dim")  # fmt: skip
CACHES = ("layer: block kv token head dim", "layer: kv block token head dim", "layer block kv token head dim")


@st.composite
def pairs(draw, device: Device, direction: str):
    """A paged cache, and a pool of blocks as large or some times as large; what is moved may begin inside a block."""
    layer, factor, dim = draw(st.integers(2, 5)), draw(st.sampled_from((1, 1, 2, 3))), draw(st.sampled_from((16, 48)))
    cache = OnDevice(draw(st.sampled_from(CACHES)), layer=layer, dim=dim, padded=draw(st.booleans()))
    pool = Paged(draw(st.sampled_from(HOSTS)), layer=layer, token=2 * factor, dim=dim, padded=draw(st.booleans()))
    ids = draw(st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True))
    skip = draw(st.integers(0, factor - 1))
    blocks = -(-(len(ids) + skip) // factor)
    large = draw(st.lists(st.integers(0, 8), min_size=blocks, max_size=blocks, unique=True))
    if draw(st.booleans()):
        large.sort()  # neighbours on the host are copied together
    move = Move(large, ids, skip, 0) if direction in ("load", "pull") else Move(ids, large, 0, skip)
    pair = pair_on(device, direction, cache, pool)
    return pair, pair.plan(move)


class Pieces:
    """One transfer, prepared both ways on one executor.

    Attributes:
        segment: the calls that one loop has written; None if it has not.
        wanted: for each piece, the calls of the generic way.
    """

    def __init__(self, executor: kvplan.Executor, path: str, plan: kvplan.Plan, count: int) -> None:
        backend = executor._backend
        self.backend, self.path, self.plan = backend, backend.paths[path], plan
        self.lane, self.resources = backend.lanes.get(plan.direction, backend.lanes["load"]), backend.resources
        self.cuts = cuts_of(plan, count)
        self.count = count

    def transfer(self) -> DeviceTransfer:
        return DeviceTransfer(self.plan, self.resources, self.backend.callbacks, self.path.name, None, self.count)


def moves_of(header: int, moved: list[tuple[int, int, int]]) -> tuple[list[list[int]], list[int]]:
    """The units of a header, and its run table. ``moved``: what is copied, (src, dst, bytes), before a kernel reads."""

    def at(address: int) -> int:
        found = [src + address - dst for src, dst, nbytes in moved if dst <= address < dst + nbytes]
        return found[0] if found else address

    count, items, chunks, src, dst, *table, headers = words(at(header), 9).tolist()
    assert headers == 1
    return [words(at(side), count).tolist() for side in (src, dst)], [items, chunks, *table]


def written(segment: Segment, moved: list[tuple[int, int, int]]) -> list[tuple[Any, ...]]:
    """The calls in words that two ways can be compared by."""
    made = []
    for which, one, end, stream in segment.rows.tolist():
        if which in (RECORD, WAIT):
            made.append((which, one, stream))
        elif which == LAUNCH:
            made.append((which, *moves_of(one, moved), segment.launches[end].tolist(), stream))
        else:
            assert which in (COPY, BATCH)
            assert segment.columns.flags.c_contiguous
            copies = segment.columns[:, one : one + 1 if which == COPY else end]
            made.append((which, sorted(copies.T.tolist()), stream))
    return made


def without(calls: list[tuple[Any, ...]], *dropped: tuple[int, int]) -> list[tuple[Any, ...]]:
    return [call for call in calls if (call[0], call[1]) not in dropped]


@pytest.mark.parametrize("direction", ["load", "store"])
@examples(150)
@given(
    data=st.data(), seed=st.integers(0, 2**32), tight=st.booleans(), slots=st.integers(1, 4), count=st.integers(2, 4),
    before=st.booleans(), least=st.sampled_from((0, 1, 40, 100)),
    few=st.integers(0, 9),
)  # fmt: skip
def test_the_chunks_of_all_pieces_are_those_of_each(direction, data, seed, tight, slots, count, before, least, few):
    device = Device(seed, eager=False)  # no upload ends between the two ways
    _, plan = data.draw(pairs(device, direction))
    cuts = cuts_of(plan, count)
    assume(cuts is not None)
    granule = max(staging_of(group, direction).nbytes for group in cuts.groups)
    sizes = {"batch_nbytes": least, "inline_effort": 1 << 20}  # in short lists, streams wait for slots
    limits = Limits(**TIGHT | sizes | {"few_chunks": few} if tight else sizes)
    policy = {"staging_bytes": max(1024, slots * granule), "chunk_bytes": 256}
    with executor_on(device, "staged", limits=limits, **policy) as executor:
        if before:  # a transfer that may still use the ring
            earlier = executor.submit(split_layers(plan, count)[0][1])
            while earlier.queued:
                time.sleep(1e-3)
        each = Pieces(executor, "staged", plan, count)
        path, lane, resources = each.path, each.lane, each.resources
        one, other = each.transfer(), each.transfer()
        ring = path._ring(one, lane.name, granule)
        kept = ring.next, list(ring.users)
        generic = [path.prepare(one, piece, lane)[0] for _, piece in split_layers(plan, count)]
        after, (ring.next, ring.users) = ring.next, kept
        marks = [other.event() for _ in cuts.layers]
        result = StagedLayers(resources, path._programs).write(
            other, plan, cuts, lane, partial(path._ring, other, lane.name), marks
        )
        assert result is not None
        segment, marked, carried = result
        assert [segment.rows[k - 1, :2].tolist() for k in marked] == [[RECORD, mark] for mark in marks]
        assert (other.copies, other.launches) == (one.copies, one.launches)
        assert ring.next == after
        load = direction == "load"
        rows = segment.rows.tolist()
        # Headers and units reach the GPU once: behind the first extents, or by a launch before all calls.
        moved = []
        if load:
            (at,) = [k for k, row in enumerate(rows) if row[:2] == [COPY, 0]]
            assert all(row[0] != LAUNCH for row in rows[:at])
            assert all(row[0] in (COPY, BATCH, WAIT) for row in rows[: at + 1])
            moved = [tuple(segment.columns[:, 0].tolist())]
            rows.pop(at)
        else:
            chunks = sum(row[0] == LAUNCH for row in rows)
            assert (carried is not None) == (chunks > limits.few_chunks)
            if carried is not None:
                moved = [(carried[0].address, carried[1].address, carried[2])]
        # The model's stream waits for each layer, so no second stream of kernels waits for slots.
        assert {row[3] for row in rows} <= {lane.copy, lane.kernel}
        wanted = []
        for number, made in enumerate(generic):
            launch = segment.launches[number][None]
            pieces = [Segment(row[None], made.made, launch) for row in made.rows
                      if not load or (row[0], row[1]) != (COPY, 0)]  # fmt: skip
            inside = [tuple(made.made[:, 0].tolist())] if load else []
            if made.carry:
                _, (_, _, src, dst, nbytes) = moves_of(made.carry, [])
                inside = [tuple(int(words(at, 1)[0]) for at in (src, dst, nbytes))]
            own = (made.kernel[0], segment.launches[number][0])
            assert own[0] == own[1]
            wanted += [call for piece in pieces for call in written(piece, inside)]
            wanted.append((RECORD, marks[number], lane.kernel if load else lane.copy))
        ours = written(segment._replace(rows=np.array(rows, np.int64).reshape(-1, 4)), moved)
        assert ours == wanted
        for loans in (one, other):
            loans._return_loans()
        device.run()


@pytest.mark.parametrize("direction", ["load", "store", "device", "push", "pull"])
@examples(60)
@given(
    data=st.data(), seed=st.integers(0, 2**32), tight=st.booleans(), count=st.integers(2, 4), near=st.integers(0, 40)
)
def test_the_launches_of_all_pieces_are_those_of_each(direction, data, seed, tight, count, near):
    device = Device(seed)
    peers = [Device(ordinal=1, beside=device)] if direction in ("push", "pull") else []
    _, plan = data.draw(pairs(device, direction))
    cuts = cuts_of(plan, count)
    assume(cuts is not None)
    limits = Limits(**{**TIGHT, "launch_rows": 1 << 30} if tight else {}, **({} if tight else {"near_rows": near}))
    with executor_on(device, "kernel", limits=limits) as executor:
        each = Pieces(executor, "kernel", plan, count)
        path, lane = each.path, each.lane
        one, other = each.transfer(), each.transfer()
        size, marks = path._size(plan), [other.event() for _ in cuts.layers]
        tile = min(size.tile, 64 << 10)
        result = KernelLayers(each.resources).write(other, plan, cuts, lane.kernel, size, tile, marks)
        assert result is not None
        segment, marked, _ = result
        assert [segment.rows[k - 1, :2].tolist() for k in marked] == [[RECORD, mark] for mark in marks]
        assert (one.copies, one.launches) == (0, 0)
        rows, moved = segment.rows.tolist(), []
        if segment.columns.size:
            assert rows.pop(0) == [COPY, 0, 0, lane.kernel]
            moved = [tuple(segment.columns[:, 0].tolist())]
        assert len(rows) == 2 * len(marks)
        for (_, piece), launch, record, mark in zip(
            split_layers(plan, count), rows[::2], rows[1::2], marks, strict=True
        ):
            ((kernel, programs, header, (source, nbytes)),), stream = path.prepare(one, piece, lane)
            assert launch[0] == LAUNCH
            assert record == [RECORD, mark, 0, stream]
            words_of = segment.launches[launch[2]].tolist()
            assert [words_of[0], words_of[1] & 0xFFFFFFFF, launch[3]] == [kernel[0], programs, stream]
            assert moves_of(launch[1], moved) == moves_of(header, [(source, header, nbytes)] if nbytes else [])
        assert (other.copies, other.launches) == (one.copies, one.launches)
        for loans in (one, other):
            loans._return_loans()
        device.run()
    assert not any(peer.wrong for peer in peers)


@pytest.mark.parametrize(("path", "direction"), [*product(("kernel", "staged"), ("load", "store")),
                         ("kernel", "device"), ("kernel", "push"), ("kernel", "pull")])  # fmt: skip
@examples(60)
@given(
    data=st.data(), seed=st.integers(0, 2**32), tight=st.booleans(), slots=st.integers(1, 4), turns=st.integers(1, 3),
    streams=st.sampled_from((None, 1)),
)  # fmt: skip
def test_bytes_arrive_layer_by_layer(path, direction, data, seed, tight, slots, turns, streams):
    """Law 3 for transfers by layer of one run group: a stream that waits for a layer finds all of its bytes."""
    device = Device(seed)
    _peer = Device(ordinal=1, beside=device)
    pair, plan = data.draw(pairs(device, direction))
    limits = Limits(**{**TIGHT, "launch_rows": 1 << 30} if tight else {"layer_group_nbytes": 1, "batch_nbytes": 0})
    policy = {}
    if path == "staged":
        granule = staging_of(plan.parts[0].group, direction).nbytes
        policy = {"staging_bytes": max(1024, slots * granule), "chunk_bytes": 256, "streams": streams}
    at_once = []
    with (
        executor_on(device, path, limits=limits, **policy) as executor,
        mock.patch.object(DeviceTransfer, "pieces", autospec=True, side_effect=at_once.append),
    ):
        transfers = [executor.submit(plan, by_layer=True) for _ in range(turns)]
        for transfer in transfers:
            assert sum(map(len, transfer.layer_groups)) == len(plan.layers)
        reader = Stream(device.stream())
        arrived = []

        def check(layer: int) -> None:
            ours, wanted = (pair.dst.of_layer(roots, layer) for roots in (pair.dst_roots, pair.dst_bytes))
            assert (ours == wanted).all()
            arrived.append(layer)

        for layer in plan.layers:
            transfers[0].wait_layer(layer, reader)
            device.put(reader.cuda_stream, partial(check, layer))
        for transfer in transfers:
            transfer.synchronize()
        device.run()
        assert arrived == list(plan.layers)
        pair.check()
    assert not at_once, "the pieces were prepared one by one"

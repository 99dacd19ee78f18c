"""The transport of GPU memory, on simulated GPUs: what it offers, what it refuses, and what it gives back."""

from __future__ import annotations

import copy
import uuid
from contextlib import suppress

import numpy as np
import pytest

import kvplan
from kvplan import LayoutError, PathError
from kvplan.agents.cuda_ipc import cuda_ipc_notes
from kvplan.agents.cuda_ipc.cuda_ipc_messages import Message
from kvplan.agents.cuda_ipc.cuda_ipc_way import CudaIpcWay
from kvplan.agents.relocation import regions_of
from kvplan.cuda.ipc import openings, shared_words
from tests.agents.cuda_ipc.simulated_ipc import (
    BLOCKS,
    ORIGIN,
    ROW,
    cache,
    devices_that_are_left_alone,
    join,
    joined,
)
from tests.simulated import Tensor
from tests.simulated.ipc import UUID, handle_of

NBYTES = BLOCKS * ROW
UUIDS = [str(uuid.UUID(bytes=UUID + bytes([k]))) for k in range(2)]


devices = pytest.fixture(devices_that_are_left_alone)


def test_the_part_of_a_card_names_allocations_by_gpu_address_and_handle(devices):
    array, layout = cache(devices, 1)
    addresses = [layer.ctypes.data for layer in array]
    offer = CudaIpcWay().offer(regions_of([layout]))
    assert offer.part == {
        "memory": [
            {"gpu": UUIDS[1], "address": at, "nbytes": NBYTES, "handle": bytes(handle_of(at, b"mem ")).hex(),
             "pieces": []}
            for at in addresses
        ]
    }  # fmt: skip
    checked = CudaIpcWay("cuda:0").check(offer.part, regions_of([layout]), ORIGIN)
    assert (checked.ranges, checked.descriptors, checked.hello) == (tuple((at, NBYTES) for at in addresses), 1, {})
    offer.close()


def test_regions_of_one_allocation_are_offered_once(devices):
    array = np.zeros((4, BLOCKS, ROW), np.uint8)
    for device in devices:
        device.own(array, 0)
    layouts = [kvplan.KVLayout.from_tensors("block dim", Tensor(array[k], "cuda:0")) for k in (2, 0, 3)]
    offer = CudaIpcWay().offer(regions_of(layouts))
    assert [(row["address"], row["nbytes"]) for row in offer.part["memory"]] == [(array.ctypes.data, array.nbytes)]
    offer.close()


def test_host_memory_and_unknown_memory_are_refused(devices):
    host = kvplan.KVLayout.from_tensors("block dim", np.zeros((4, 4), np.uint8))
    assert "transport 'shm' offers host memory" in CudaIpcWay().refuse(host.regions[0])
    _, layout = cache(devices, 0)
    for device in devices:
        device.owned.clear()
    assert CudaIpcWay().refuse(layout.regions[0])


def test_a_machine_without_a_gpu(devices):
    for device in devices:
        device.driver.visible = 0
    with pytest.raises(PathError, match="no GPU is visible"):
        CudaIpcWay()


HOSTILE = {
    "no table": lambda part: [],
    "another key": lambda part: part | {"more": 1},
    "no rows": lambda part: {"memory": []},
    "a row that is none": lambda part: {"memory": [*part["memory"], 7]},
    "a key too many": lambda part: changed(part, more=1),
    "a GPU's number": lambda part: changed(part, gpu=0),
    "a UUID of another form": lambda part: changed(part, gpu="GPU-1"),
    "an address below zero": lambda part: changed(part, address=-1),
    "an address that is no number": lambda part: changed(part, address="0x10"),
    "a huge address": lambda part: changed(part, address=2**63),
    "no bytes": lambda part: changed(part, nbytes=0),
    "a bool": lambda part: changed(part, nbytes=True),
    "fewer bytes than the layout": lambda part: changed(part, nbytes=NBYTES - 1),
    "more bytes, over the next": lambda part: changed(part, nbytes=NBYTES * 4),
    "a short handle": lambda part: changed(part, handle="00" * 63),
    "a handle in capitals": lambda part: changed(part, handle="AB" * 64),
    "no handle": lambda part: changed(part, handle=""),
    "a handle and pieces": lambda part: changed(part, pieces=[[NBYTES, 1]]),
    "pieces of other sizes": lambda part: changed(part, handle="", pieces=[[NBYTES - 1, 1]]),
    "pieces without a count": lambda part: changed(part, handle="", pieces=[[NBYTES]]),
    "pieces without end": lambda part: changed(part, handle="", pieces=[[1, 2**40]]),
    "many runs of many pieces": lambda part: changed(part, handle="", pieces=[[1, 2**17]] * 1000),
    "another order": lambda part: {"memory": part["memory"][::-1]},
    "one allocation twice": lambda part: {"memory": [part["memory"][0], *part["memory"]]},
    "one allocation too few": lambda part: {"memory": part["memory"][1:]},
}


def changed(part, **fields):
    """The same with other fields in the first allocation."""
    part = copy.deepcopy(part)
    part["memory"][0] |= fields
    return part


@pytest.mark.parametrize("change", HOSTILE)
def test_a_wrong_part_is_refused_and_nothing_is_opened(devices, change):
    _, layout = cache(devices, 0)
    offer = CudaIpcWay().offer(regions_of([layout]))
    devices[0].calls.clear()
    with pytest.raises(LayoutError):
        CudaIpcWay().check(HOSTILE[change](offer.part), regions_of([layout]), ORIGIN)
    assert not [call for call in devices[0].calls if "Open" in call or "Map" in call]
    offer.close()


def test_a_gpu_that_this_process_does_not_see_is_refused(devices):
    _, layout = cache(devices, 1)
    offer = CudaIpcWay().offer(regions_of([layout]))
    devices[0].driver.visible = 1
    with pytest.raises(PathError, match=r"which this process does not see.*CUDA_VISIBLE_DEVICES"):
        CudaIpcWay("cuda:0").check(offer.part, regions_of([layout]), ORIGIN)
    offer.close()


def test_a_gpu_that_cannot_reach_the_other_is_refused(devices):
    _, layout = cache(devices, 1)
    offer = CudaIpcWay().offer(regions_of([layout]))
    devices[0].unreachable[1] = "no link"
    with pytest.raises(PathError, match="cuda:0 cannot reach the memory of cuda:1"):
        CudaIpcWay("cuda:0").check(offer.part, regions_of([layout]), ORIGIN)
    offer.close()


MESSAGES = [
    b"", b"x", b"n", b"n\0", Message(b"e", 0, 1, bytes(64)).written(),
    Message(b"n", 0, 0, b"note").written(), Message(b"d", 0, 2).written(),
    Message(b"z", 0, 1, b"note").written(), Message(b"n", 2, 1).written(), Message(b"n", 0, 2, b"note").written(),
    Message(b"m", 0, 2, b"note").written(), Message(b"r", 0, 1, b"note").written(), Message(b"b", 1, 1).written(),
    Message(b"n", 0, 1, bytes(30_000)).written(),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_that_no_visitor_sends_end_the_connection(devices, message):
    _, there = cache(devices, 0)
    with joined(there) as ends:
        ends.hear()
        with pytest.raises(LayoutError, match="came for cuda_ipc; no agent of kvplan sends it"):
            ends.served.heard(message)
        with pytest.raises(LayoutError, match="came for cuda_ipc"):
            ends.opened.heard(message)


def test_notes_without_end_are_refused(devices, monkeypatch):
    monkeypatch.setattr(cuda_ipc_notes, "MOST_PENDING", 3)
    _, there = cache(devices, 0)
    with joined(there) as ends:
        for lane, number in ((0, 1), (0, 2), (1, 1)):
            ends.served.heard(Message(b"n", lane, number, b"note").written())
        for number in (3, 2, 4):
            with pytest.raises(LayoutError):
                ends.served.heard(Message(b"n", 0, number, b"note").written())
        with pytest.raises(LayoutError):
            ends.served.heard(Message(b"m", 0, 2, b"more").written())  # not the next one
        assert ends.served.notes() == []
        monkeypatch.setattr(cuda_ipc_notes, "MOST_PENDING_NBYTES", 11)
        with pytest.raises(LayoutError):
            ends.served.heard(Message(b"m", 1, 2, b"more").written())


@pytest.mark.parametrize("call", [
    "cuIpcOpenMemHandle", "cuMemGetAddressRange", "cuMemHostRegister", "cuEventCreate",
])  # fmt: skip
@pytest.mark.parametrize("spare", range(7))
def test_a_call_that_fails_while_opening_leaves_nothing(devices, call, spare):
    _, there = cache(devices, 1)
    for device in devices:
        device.fail(call, spare=spare)
    with suppress(PathError, kvplan.TransferError):  # the latter, in the owner
        join(there, "cuda:0").close()
    for device in devices:
        device.faults.clear()


def test_a_handle_that_maps_less_is_refused(devices):
    _, there = cache(devices, 0)
    regions = regions_of([there])
    offer = CudaIpcWay().offer(regions)
    checked = CudaIpcWay().check(offer.part, regions, ORIGIN)
    served = offer.serve({}, lambda message: None)
    devices[0].owned[1] = (devices[0].owned[1][0], devices[0].owned[1][1] - 1, 0)
    with pytest.raises(LayoutError, match=f"maps {NBYTES - 1} bytes; its card promises {NBYTES}"):
        CudaIpcWay().open(checked, served.table, served.descriptors, lambda message: None, ORIGIN)
    served.close()
    offer.close()


@pytest.mark.parametrize("table", [{"events": {}}, {"more": 1}])
def test_a_table_that_no_owner_sends_is_refused(devices, table):
    _, there = cache(devices, 0)
    regions = regions_of([there])
    offer = CudaIpcWay().offer(regions)
    checked = CudaIpcWay().check(offer.part, regions, ORIGIN)
    served = offer.serve({}, lambda message: None)
    with pytest.raises(LayoutError):
        CudaIpcWay().open(checked, table, served.descriptors, lambda message: None, ORIGIN)
    with pytest.raises(LayoutError, match="0 descriptors came for cuda_ipc; the card says 1"):
        CudaIpcWay().open(checked, served.table, [], lambda message: None, ORIGIN)
    served.close()
    with pytest.raises(LayoutError, match="takes none"):
        offer.serve({"more": 1}, lambda message: None)
    offer.close()


def test_what_was_closed_is_present_no_more_and_closes_twice(devices):
    _, there = cache(devices, 0)
    ends = join(there)
    owners = [one.owner for one in ends.opened.mapped]
    assert [owner.present() for owner in owners] == [one.here for one in ends.opened.mapped]
    ends.opened.release()
    ends.opened.release()
    assert [owner.present() for owner in owners] == [0, 0]
    assert ends.opened.before(None, "after") == "after"
    ends.close()
    ends.opened.close()


def test_a_child_of_a_fork_touches_nothing_of_the_gpu(devices, monkeypatch):
    _, there = cache(devices, 0)
    ends = join(there)
    now, calls = openings.generation(), len(devices[0].calls)
    with monkeypatch.context() as patch:
        for module in (openings, shared_words):
            patch.setattr(module, "generation", lambda: now + 1)
        patch.setattr("kvplan.agents.cuda_ipc.cuda_ipc_lane.generation", lambda: now + 1)
        kept = openings._processes[0]
        ends.opened.close()
        assert len(devices[0].calls) == calls
        openings._processes[0] = kept
    assert devices[0].driver.mapped
    entries = devices[0].driver  # what the child left alone is its parent's
    entries.mapped.clear()
    entries.registered.clear()
    kept.alive.clear()
    ends.served.close()
    ends.offer.close()
    devices[0].theirs |= devices[0].made

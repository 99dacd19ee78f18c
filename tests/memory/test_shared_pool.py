"""Pools that processes share by name: names, geometry, files of others, what the system refuses. In one process."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from itertools import count

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from kvplan.memory.shared import path_of, share

NOTATION = "block layer kv token head dim"


def rank(layers=(0, 1), heads=range(2), dtype=np.int16, part="kv"):
    """A cache of some layers and heads: 4 blocks of 3 tokens."""
    tensors = [np.zeros((2, 4, 3, len(heads), 5), dtype) for _ in layers]
    return KVLayout.from_tensors("layer: kv block token head dim", tensors, layers=layers, head_start=heads.start,
                                 part=part)  # fmt: skip


class Lock:
    """Another user's lock on a file, whatever the file is."""

    def __init__(self, path, kind):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.fd, kind)

    def release(self):
        os.close(self.fd)


def test_one_name_is_one_memory_and_the_last_user_unlinks_it(name):
    one = kvplan.allocate(NOTATION, like=rank(), shared=name)
    two = kvplan.allocate(NOTATION, like=rank(), shared=name)
    assert one.tensors.shape == (4, 2, 2, 3, 2, 5)
    assert not one.tensors.any()
    one.tensors[3, 1, 0, 2, 1] = [1, 2, 3, 4, 5]
    assert two.tensors[3, 1, 0, 2, 1].tolist() == [1, 2, 3, 4, 5]
    assert one.regions[0].address != two.regions[0].address
    told = path_of(name).stat()
    assert stat.S_IMODE(told.st_mode) == 0o600
    assert told.st_size == 2 * mmap.PAGESIZE  # the header, and 960 bytes
    view = one.tensors[3:]
    del one
    assert path_of(name).exists()
    del two
    assert path_of(name).exists(), "what is made of the memory is a use of it"
    del view
    assert not path_of(name).exists()


def test_a_pool_of_more_layers_and_heads_than_like_has(name):
    pools = [
        kvplan.allocate(NOTATION, like=rank(layers, heads), layers=[2, 0, 1], heads=range(1, 7), shared=name)
        for layers, heads in (((0, 1), range(1, 3)), ((2,), range(5, 7)))
    ]
    assert pools[0].tensors.shape == (4, 3, 2, 3, 6, 5)
    assert (pools[0].layers, pools[0].heads) == ((0, 1, 2), range(1, 7))
    pools[0].tensors[1, 2, 0, 0, 5] = 9
    address = pools[1].address(layer=2, part="k", block=1, token=0, head=6) - pools[1].regions[0].address
    assert pools[1].tensors.view(np.uint8).reshape(-1)[address] == 9
    alone = kvplan.allocate(NOTATION, like=rank((1,)), layers=range(3), heads=range(4))
    assert (alone.tensors.shape, alone.layers, alone.heads) == ((4, 3, 2, 3, 4, 5), (0, 1, 2), range(4))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_nested_tensors_lie_in_one_file_each_on_a_page_and_the_header_in_none(name, framework):
    like = rank()
    if framework == "torch":
        tensors = [torch.zeros(2, 4, 3, 2, 5, dtype=torch.int16) for _ in range(2)]
        like = KVLayout.from_tensors("layer: kv block token head dim", tensors)
    one, two = (kvplan.allocate("layer kv: block head token dim", like=like, shared=name) for _ in range(2))
    assert type(one.tensors[0][0]).__module__.startswith(framework)
    assert [len(one.tensors), len(one.tensors[0]), tuple(one.tensors[0][0].shape)] == [2, 2, (4, 2, 3, 5)]
    assert [(r.address % mmap.PAGESIZE, r.nbytes, r.writable) for r in one.regions] == [(0, 240, True)] * 4
    assert path_of(name).stat().st_size == 5 * mmap.PAGESIZE
    for k, tensor in enumerate(tensor for pair in one.tensors for tensor in pair):
        tensor[...] = k + 1
    assert [int(tensor[3, 1, 2, 4]) for pair in two.tensors for tensor in pair] == [1, 2, 3, 4]
    content = path_of(name).read_bytes()
    assert content.startswith(b"kvplan.pool\nwhole.\nformat 1 | layer kv: block head token dim | ")
    assert [content[k * mmap.PAGESIZE] for k in range(1, 5)] == [1, 2, 3, 4]


# A file that is there.


def content_of(path, like=None):
    """What a pool's file holds, its content being sevens."""
    pool = kvplan.allocate(NOTATION, like=like or rank(), shared=path)
    pool.tensors[...] = 7
    content = path.read_bytes()
    del pool
    return content


LEFT = {
    "whole": content_of,
    "of another geometry": lambda path: content_of(path, rank((0, 1, 2))),
    "half made": lambda path: content_of(path).replace(b"whole.", b"making", 1),
    "cut": lambda path: content_of(path)[:5000],
    "of another format": lambda path: content_of(path).replace(b"format 1", b"format 9", 1),
    "empty": lambda path: b"",
    "begun": lambda path: bytes(mmap.PAGESIZE),
    "wrong after its first line": lambda path: b"kvplan.pool\n\xff\xfe",
}


@pytest.mark.parametrize("left", LEFT)
def test_what_killed_users_left_is_made_anew(path, left):
    path.write_bytes(LEFT[left](path))
    old = os.open(path, os.O_RDONLY)  # keeps the number of the file from being used again
    pool = kvplan.allocate(NOTATION, like=rank(), shared=path)
    assert not pool.tensors.any()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    replaced = not os.path.samestat(os.fstat(old), path.stat())
    assert replaced == (left != "empty"), "what may be mapped is not cut, but replaced"
    os.close(old)
    del pool
    assert not path.exists()


@pytest.mark.parametrize("content", [bytes(100), bytes(2 * mmap.PAGESIZE), b"kvplan.poo"])
def test_a_file_of_somebody_else_stays_as_it_is(path, content):
    path.write_bytes(content)
    with pytest.raises(kvplan.HostMemoryError, match="is a file that kvplan did not make; remove it, or take another"):
        share(path, "mine", [100])
    lock = Lock(path, fcntl.LOCK_SH)
    with pytest.raises(kvplan.HostMemoryError, match="is in use and is not a pool of kvplan; take another name"):
        share(path, "mine", [100])
    lock.release()
    assert path.read_bytes() == content


def test_another_user_s_pool_is_not_touched(path, monkeypatch):
    path.write_bytes(content_of(path))
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(
        kvplan.HostMemoryError, match=r"belongs to user \d+, and this process to \d+; take another name"
    ):
        kvplan.allocate(NOTATION, like=rank(), shared=path)
    assert path.exists()


def test_who_makes_it_is_waited_for(path):
    lock = Lock(path, fcntl.LOCK_EX)  # as one that has begun
    made = []
    thread = threading.Thread(target=lambda: made.append(share(path, "mine", [100])))
    thread.start()
    lock.release()  # and was killed
    thread.join(60)
    assert made[0].tensors[0].nbytes == 100


@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_who_does_not_finish_it_is_waited_for_while_the_file_grows(path, monkeypatch, kind):
    path.write_bytes(b"kvplan.pool\nmaking\n")
    lock = Lock(path, kind)
    clock, pages = count(step=15), count(1)

    def grow(_):
        if (page := next(pages)) < 8:
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), page * mmap.PAGESIZE, mmap.PAGESIZE)

    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", grow)
    with pytest.raises(kvplan.HostMemoryError, match=r"another process keeps .* locked and does not finish it"):
        share(path, "mine", [100])
    assert next(pages) > 8
    lock.release()


@pytest.mark.parametrize("calls, failed", [(0, "reserve .* bytes for"), (1, "share")])
def test_a_pool_that_cannot_be_mapped_leaves_no_file(name, monkeypatch, calls, failed):
    real, left = mmap.mmap, [calls]

    def refused(*arguments):
        if not left[0]:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        left[0] -= 1
        return real(*arguments)

    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(kvplan.HostMemoryError, match=rf"cannot {failed} '.*': Cannot allocate memory"):
        share(name, "mine", [100])
    assert not path_of(name).exists()


@pytest.mark.parametrize("device", [None, 5])
def test_a_device_is_a_text_or_of_torch(device):
    with pytest.raises(kvplan.LayoutError, match=f"device is {device}, which torch does not know; give 'cpu' or"):
        kvplan.allocate(NOTATION, like=rank(), device=device)


def test_removing_a_pool_in_use_leaves_its_users_their_memory(path):
    old = share(path, "mine", [100])
    path.unlink()
    new = share(path, "mine", [100])
    old.tensors[0][...] = 1
    assert not new.tensors[0].any()
    del old
    assert path.exists(), "the successor's file is not its predecessor's to unlink"

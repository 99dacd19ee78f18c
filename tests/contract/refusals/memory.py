"""Refusals of pools: orders that hold no cache, pages of several parts, and memory that processes share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import kvplan
from kvplan import HostMemoryError, KVLayout, LayoutError, NotationError
from tests.contract.refusals.table import REFUSED, tensors

LIKE = tensors("layer kv block token head dim", 3, 2, 8, 16, 4, 8)
CKV, KPE = tensors("block token dim", 4, 8, 16, part="ckv"), tensors("block token dim", 4, 8, 2, part="kpe")
SUBBLOCKS = tensors("layer block dim", 2, 6, 8)
NARROW = tensors("block token dim", 4, 8, 6, part="a")
WIDE = tensors("block token dim", 4, 8, 6, part="b", layer_start=1)
VALUES = tensors("layer kv block token head dim", 2, 2, 4, 8, 2, 16)
SCALE = tensors("layer kv block token head", 2, 2, 4, 8, 2, kind=np.float32, part="scale")
QUANTIZED = KVLayout.merge([VALUES, SCALE])
ONE_HEAD = KVLayout.merge([VALUES, tensors("layer block token head", 2, 4, 8, 1, part="scale")])
ONE_LAYER = KVLayout.merge([VALUES, tensors("layer block token dim", 1, 4, 8, 6, part="index")])
BEHIND = "k_scale v_scale: head token"
REFUSED["allocate", lambda notation, like, more: kvplan.allocate(notation, like=like, **more), LayoutError] = [
    ("block layer token head dim", LIKE, {}, "has no kv axis"),
    ("block kv token head dim", LIKE, {}, "'layer' ... axis"),
    ("block layer kv token head dim", LIKE, {"num_blocks": 0}, "num_blocks ... is 0"),
    ("block layer kv token head dim", LIKE, {"block_tokens": 1.5}, "block_tokens ... 1.5"),
    ("block head.0 layer kv token head.1 dim", LIKE, {}, "sizes['head.0'] ... needs"),
    ("block head.0 layer kv token head.1 dim", LIKE, {"sizes": {"head.0": 3}}, "head ... split"),
    ("block layer kv token head dim", LIKE, {"sizes": {"head": 3}}, "needs 4 ... pool"),
    ("block token dim", KVLayout.merge([CKV, KPE]), {}, "parts of one size"),
    ("block kv token dim", CKV, {}, "kv axis for parts"),
    ("block layer token dim", KVLayout.merge([NARROW, WIDE]), {}, "not every layer"),
    ("block | k V: layer token head dim", LIKE, {}, "'V' and 'v' differ only in letter case"),
    ("block layer dim", SUBBLOCKS, {"block_tokens": 64}, "no 'token' axis ... 64 ... 'subblock'"),
    ("block subblock dim", CKV, {}, "opaque sub-blocks ... token slots"),
    ("auto", LIKE, {"sizes": {"dim.1": 8}}, "'auto' ... split axes itself"),
    ("auto", LIKE, {"heads": range(6)}, "heads 0 to 3 ... no equal share ... 0 to 5"),
    ("block token head dim", CKV, {"heads": range(4), "shared": True}, "no head axis"),
    ("block layer | k v: head token dim", QUANTIZED, {}, "'k_scale' ... place for ... part"),
    (f"block layer | k v k: head token dim | {BEHIND}", QUANTIZED, {}, "'k' ... names part ... twice"),
    (f"block layer | k v w: head token dim | {BEHIND}", QUANTIZED, {}, "'w' ... names part ... like holds"),
    (f"block | k v: head token dim | {BEHIND}", QUANTIZED, {}, "'layer' ... axis"),
    ("block layer head | k v: token dim | scale: token", ONE_HEAD, {}, "2 for part 'k' ... 1 for part 'scale'"),
    ("block layer | k v: head token dim | index: token dim", ONE_LAYER, {}, "2 for part 'k' ... 1 for part 'index'"),
]
REFUSED["allocate", lambda notation: kvplan.allocate(notation, like=QUANTIZED), NotationError] = [
    ("block layer | head token dim", "'|' ... stand the ... behind"),
    ("block layer | : head token dim", "'|' ... stand the ... behind"),
    (f"block layer | k v: heads dim | {BEHIND}", "axis 'heads' ... column 20"),
    ("block layer | k v: head token dim | k_scale v_scale:  head tokn", "'tokn' ... column 60"),
    ("block layer | k v: head: token dim", "':' ... second ... column 24"),
]

NOTATION = "block layer kv token head dim"
RANK = tensors(NOTATION, 4, 2, 2, 3, 2, 5)
SHARED = f"kvplan-refused-{os.getpid()}"
REFUSED["allocate(shared=)", lambda more: kvplan.allocate(NOTATION, like=RANK, shared=SHARED, **more), LayoutError] = [
    ({"layers": [1]}, "layers 0, and ... are 1"),
    ({"layers": [0, 0, 1]}, "layers ... [0, 0, 1]"),
    ({"layers": [0, 1, -1]}, "global numbers ... each once"),
    ({"layers": 2}, "layers ... is 2"),
    ({"layers": []}, "layers ... []"),
    ({"heads": range(1)}, "heads 0 ... -1, and ... are 0"),
    ({"heads": range(0, 4, 2)}, "heads ... (0, 4, 2) ... step 1"),
    ({"heads": 4}, "heads ... is 4"),
    ({"heads": range(-1, 4)}, "from 0"),
    ({"device": "cuda:0"}, "device ... 'cuda:0' ... CPU"),
]
REFUSED["allocate(shared=)", lambda name: kvplan.allocate(NOTATION, like=RANK, shared=name), LayoutError] = [
    ("", "shared ... '' ... to 200 letters"),
    *[(name, "shared ... a name has") for name in (".", "..", ".hidden", "-r", "a b", "kv\n", "kv\0", "é", "k" * 201)],
    ("pools/kv", "absolute path ... must"),
    ("../kv", "absolute path"),
    ("/tmp/../etc/kv", "'..' ... without"),
    ("/tmp/kv/", "absolute path ... file"),
    ("/tmp/k\0v", "absolute path"),
    ("/kv", "'kv' ... root folder ... write"),
    ("/", "absolute path ... file"),
    (7, "shared ... is 7"),
    (b"kv", "shared ... b'kv'"),
]


def beside(notation=NOTATION, like=RANK, **more):
    """A second pool of one name, of another geometry."""
    path = str(Path("pool").absolute())
    pool = kvplan.allocate(NOTATION, like=RANK, shared=path)
    pool.tensors[...] = 3
    try:
        kvplan.allocate(notation, like=like, shared=path, **more)
    finally:
        assert (pool.tensors == 3).all()


def at(make):
    """A pool where something else is, or what was made of one."""
    path = Path("pool").absolute()
    kept = [make(path)]
    try:
        kvplan.allocate(NOTATION, like=RANK, shared=path)
    finally:
        kept.clear()


def cut(path):
    pool = kvplan.allocate(NOTATION, like=RANK, shared=path)
    os.truncate(path, 4096)
    return pool


REFUSED["allocate(shared=)", lambda more: beside(**more), LayoutError] = [
    ({"notation": "layer block kv token head dim"}, "in use as another ... layer block kv token head dim | block=4"),
    ({"num_blocks": 5}, "in use as another pool ... block=5"),
    ({"block_tokens": 6}, "in use as another pool ... token=6"),
    ({"layers": range(3)}, "in use as another pool ... layers 0-2"),
    ({"heads": range(4)}, "in use as another pool ... heads 0-3"),
    ({"like": tensors(NOTATION, 4, 2, 2, 3, 2, 5, kind=np.float16)}, "in use ... uint8 ... float16"),
]
REFUSED["allocate(shared=)", at, HostMemoryError] = [
    (lambda path: path.write_bytes(b"a user's notes"), "pool ... kvplan did not make ... another"),
    (lambda path: path.symlink_to("target"), "cannot share ... pool ... symbolic links"),
    (os.mkfifo, "pool ... not a regular file ... another name"),
    (Path.mkdir, "cannot share ... pool ... Is a directory"),
    (cut, "pool ... 4096 bytes instead of 8192"),
]
REFUSED["allocate(shared=)", lambda more: kvplan.allocate(NOTATION, like=RANK, **more), HostMemoryError] = [
    ({"shared": "/none/kv"}, "none/kv ... No such file"),
    ({"shared": SHARED, "num_blocks": 1 << 40}, "bytes ... are free in '/dev/shm' ... fewer blocks"),
]

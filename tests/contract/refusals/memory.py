"""Refusals of pools: orders that hold no cache, pages of several parts, and memory that processes share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import kvplan
from kvplan import HostMemoryError, KVLayout, LayoutError, NotationError
from tests.contract.refusals.table import rows, tensors

ROWS = []

LIKE = tensors("layer kv block token head dim", 3, 2, 8, 16, 4, 8)
CKV, KPE = tensors("block token dim", 4, 8, 16, part="ckv"), tensors("block token dim", 4, 8, 2, part="kpe")
SUBBLOCKS = tensors("layer block dim", 2, 6, 8)
NARROW, WIDE = (
    tensors("block token dim", 4, 8, 6, part="a"),
    tensors("block token dim", 4, 8, 6, part="b", layer_start=1),
)
ROWS += rows(
    "allocate",
    lambda notation, like, more: kvplan.allocate(notation, like=like, **more),
    LayoutError,
    [
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
    ],
)

VALUES = tensors("layer kv block token head dim", 2, 2, 4, 8, 2, 16)
QUANTIZED = KVLayout.merge(
    [VALUES, KVLayout.from_tensors("layer kv block token head", np.zeros((2, 2, 4, 8, 2), np.float32), part="scale")]
)
ROWS += rows(
    "allocate",
    lambda notation: kvplan.allocate(notation, like=QUANTIZED),
    None,
    [
        ("block layer | head token dim", NotationError, "'|' ... stand the ... behind"),
        ("block layer | : head token dim", NotationError, "'|' ... stand the ... behind"),
        ("block layer | k: head: token dim", NotationError, "':' ... second"),
        ("block layer | k v: heads token dim | k_scale v_scale: head token", NotationError, "axis 'heads'"),
        ("block layer | k v: head token dim", LayoutError, "'k_scale' ... place for ... part"),
        (
            "block layer | k v k: head token dim | k_scale v_scale: head token",
            LayoutError,
            "'k' ... names part ... twice",
        ),
        (
            "block layer | k v w: head token dim | k_scale v_scale: head token",
            LayoutError,
            "'w' ... names part ... like holds",
        ),
        ("block layer | k v: head token dim | k_scale v_scale: head", LayoutError, "'token' ... axis"),
        ("block | k v: head token dim | k_scale v_scale: head token", LayoutError, "'layer' ... axis"),
    ],
)


ROWS += rows(
    "allocate",
    lambda notation: kvplan.allocate(notation, like=QUANTIZED),
    NotationError,
    [
        ("block layer | k v", "column 14"),
        ("block layer | k v: heads dim | k_scale v_scale: head token", "'heads' ... column 20"),
        ("block layer | k v: head token dim | k_scale v_scale:  head tokn", "'tokn' ... column 60"),
        ("blok layer | k v: head token dim | k_scale v_scale: head token", "'blok' ... column 1"),
        ("block layer | k v: head: token dim", "':' ... column 24"),
    ],
)


def of_several(notation, part):
    return kvplan.allocate(notation, like=KVLayout.merge([VALUES, part]))


ROWS += rows(
    "allocate",
    of_several,
    LayoutError,
    [
        (
            "block layer head | k v: token dim | scale: token",
            tensors("layer block token head", 2, 4, 8, 1, part="scale"),
            "'head' ... 2 for part 'k' ... 1 for part 'scale'",
        ),
        (
            "block layer | k v: head token dim | index: token dim",
            tensors("layer block token dim", 1, 4, 8, 6, part="index"),
            "'layer' ... 2 for part 'k' ... 1 for part 'index'",
        ),
    ],
)

NOTATION = "block layer kv token head dim"
RANK = tensors(NOTATION, 4, 2, 2, 3, 2, 5)
SHARED = f"kvplan-refused-{os.getpid()}"
ROWS += rows(
    "allocate(shared=)",
    lambda more: kvplan.allocate(NOTATION, like=RANK, shared=SHARED, **more),
    LayoutError,
    [
        ({"layers": [1]}, "layers 0, and ... are 1"),
        ({"layers": [0, 0, 1]}, "layers ... [0, 0, 1]"),
        ({"layers": [0, 1, -1]}, "global numbers ... each once"),
        ({"layers": 2}, "layers ... is 2"),
        ({"layers": []}, "layers ... []"),
        ({"layers": [0, True]}, "global numbers ... give the"),
        ({"heads": range(1)}, "heads 0 ... -1, and ... are 0"),
        ({"heads": range(0, 4, 2)}, "heads ... (0, 4, 2) ... step 1"),
        ({"heads": 4}, "heads ... is 4"),
        ({"heads": range(-1, 4)}, "from 0"),
        ({"device": "cuda:0"}, "device ... 'cuda:0' ... CPU"),
    ],
)
ROWS += rows(
    "allocate(shared=)",
    lambda name: kvplan.allocate(NOTATION, like=RANK, shared=name),
    LayoutError,
    [
        ("", "shared ... '' ... to 200 letters"),
        (".", "shared ... a name has"),
        ("..", "shared ... a name has"),
        (".hidden", "shared ... a name has"),
        ("-r", "shared ... a name has"),
        ("a b", "shared ... a name has"),
        ("kv\n", "shared ... a name has"),
        ("kv\0", "shared ... a name has"),
        ("é", "shared ... a name has"),
        ("k" * 201, "shared ... a name has"),
        ("pools/kv", "absolute path ... must"),
        ("../kv", "absolute path"),
        ("/tmp/../etc/kv", "'..' ... without"),
        ("/tmp/kv/", "absolute path ... file"),
        ("/tmp/k\0v", "absolute path"),
        ("/kv", "'kv' ... root folder ... write"),
        ("/", "absolute path ... file"),
        (7, "shared ... is 7"),
        (b"kv", "shared ... b'kv'"),
    ],
)


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
    """A pool where something else is."""
    path = Path("pool").absolute()
    make(path)
    kvplan.allocate(NOTATION, like=RANK, shared=path)


def cut():
    path = Path("pool").absolute()
    pool = kvplan.allocate(NOTATION, like=RANK, shared=path)
    os.truncate(path, 4096)
    try:
        kvplan.allocate(NOTATION, like=RANK, shared=path)
    finally:
        del pool


ROWS += rows(
    "allocate(shared=)",
    lambda more: beside(**more),
    LayoutError,
    [
        (
            {"notation": "layer block kv token head dim"},
            "in use as another pool ... layer block kv token head dim | block=4",
        ),
        ({"num_blocks": 5}, "in use as another pool ... block=5"),
        ({"block_tokens": 6}, "in use as another pool ... token=6"),
        ({"layers": range(3)}, "in use as another pool ... layers 0-2"),
        ({"heads": range(4)}, "in use as another pool ... heads 0-3"),
        (
            {"like": KVLayout.from_tensors(NOTATION, np.zeros((4, 2, 2, 3, 2, 5), np.float16))},
            "in use ... uint8 ... float16",
        ),
    ],
)
ROWS += rows(
    "allocate(shared=)",
    at,
    HostMemoryError,
    [
        (lambda path: path.write_bytes(b"a user's notes"), "pool ... kvplan did not make ... another"),
        (lambda path: path.symlink_to("target"), "cannot share ... pool ... symbolic links"),
        (os.mkfifo, "pool ... not a regular file ... another name"),
        (Path.mkdir, "cannot share ... pool ... Is a directory"),
    ],
)
ROWS += [
    ("allocate(shared=)", cut, HostMemoryError, "pool ... 4096 bytes instead of 8192"),
    (
        "allocate(shared=)",
        lambda: kvplan.allocate(NOTATION, like=RANK, shared=Path("none/kv").absolute()),
        HostMemoryError,
        "none/kv ... No such file",
    ),
    (
        "allocate(shared=)",
        lambda: kvplan.allocate(NOTATION, like=RANK, num_blocks=1 << 40, shared=SHARED),
        HostMemoryError,
        "bytes ... are free in '/dev/shm' ... fewer blocks",
    ),
    (
        "allocate(shared=)",
        lambda: kvplan.allocate("block token head dim", like=CKV, heads=range(4), shared=SHARED),
        LayoutError,
        "no head axis",
    ),
]

"""LMCache: its host memory objects, and engine caches by the names of its formats.

Source: LMCache 0.5.6, ``lmcache_native.pyi`` (``EngineKVFormat``), ``v1/gpu_connector/kv_format/specs`` for its
names, ``v1/memory_management.py`` (``MemoryFormat``, ``TensorMemoryObj``), ``v1/metadata.py`` (``get_shapes``) and
``v1/gpu_connector/gpu_connectors.py``. A memory object holds one chunk of tokens (256 by default): kvplan's block.
"""

from __future__ import annotations

from typing import Any, Unpack

from kvplan.backends._tensors import Numbers, check_numbers
from kvplan.base.values import optional_integer
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

# Names of EngineKVFormat, at their numbers.
ENGINE_FORMATS = (
    "NB_NL_TWO_BS_NH_HS",
    "NL_X_TWO_NB_BS_NH_HS",
    "NL_X_NB_TWO_BS_NH_HS",
    "NL_X_NB_BS_HS",
    "TWO_X_NL_X_NBBS_NH_HS",
    "NL_X_NBBS_ONE_HS",
    "NL_X_TWO_NB_NH_BS_HS",
    "NL_X_NB_TWO_NH_BS_HS",
    "NB_NL_TWO_NH_BS_HS",
    "TWO_X_NL_X_NB_BS_NH_HS",
    "NL_X_NB_NH_BS_TWO_HS",
    "NL_X_NB_BS_NH_TWO_HS",
    "NL_X_NB_NH_BS_CS",
    "NL_X_NB_BS_NH_CS",
    "NL_X_NB_BSV_BSS",
    "NL_X_TWO_NB_NH_ONE_BS_HS",
    "NL_X_TWO_X_NB_BS_NH_HS",
    "NL_X_NP_X_NB_BS_ONE_HS",
    "NL_X_NB_BS_NH_HS",
)

# Letters of a format -> the dim of a tensor that they stand for.
LETTERS = {
    "NB": "block",
    "NL": "layer",
    "TWO": "kv",
    "BS": "token",
    "NH": "head",
    "HS": "dim",
    "CS": "(kv dim)",  # K and V packed in the content; LMCache uses it for vLLM's CPU_ATTN too, where it is wrong
    "NBBS": "(block token)",
    "ONE": "1",
    # An indexer's rows: all values of a block, then all its scales. The tensor is registered as (blocks, tokens, 132),
    # but the bytes of a token do not lie together, so the token dim counts as content.
    "BSV": "dim.0",
    "BSS": "dim.1",
}

# A memory object's format -> its dims before the last. An object holds a chunk; a layerwise one holds a layer of it.
OBJECTS = {"KV_2LTD": "kv layer token", "KV_MLA_FMT": "layer token"}
LAYERWISE = {"KV_T2D": "token kv", "KV_2TD": "kv token", "KV_MLA_FMT": "token"}


def notation_of(engine_format: str) -> str:
    """Return the notation of an engine format, translated letter by letter. The last ``_X_`` becomes the colon.

    Args:
        engine_format: name of an ``EngineKVFormat``, or another name made of its letters.

    Raises:
        LayoutError: unknown letters; the message names them.

    >>> notation_of("NL_X_TWO_NB_BS_NH_HS")
    'layer: kv block token head dim'
    >>> notation_of("TWO_X_NL_X_NBBS_NH_HS")
    'kv layer: (block token) head dim'
    >>> notation_of("NB_NL_TWO_NH_BS_HS")
    'block layer kv head token dim'
    """
    *lists, dims = str(engine_format).split("_X_")
    unknown = [letter for letter in (*lists, *dims.split("_")) if letter not in LETTERS]
    if unknown == ["NP"]:
        raise LayoutError(
            f"{engine_format!r} has NP planes of different widths a layer, which no one notation holds: describe each "
            f"plane as {str(engine_format).replace('_NP_X_', '_')!r} with a part of its own, such as 'ckv', and merge"
        )
    if unknown:
        raise LayoutError(f"{engine_format!r} has unknown letters {', '.join(map(repr, unknown))}; expected some of "
                          f"{', '.join(LETTERS)}; lists end in _X_")  # fmt: skip
    right = " ".join(LETTERS[letter] for letter in dims.split("_"))
    return f"{' '.join(LETTERS[axis] for axis in lists)}: {right}" if lists else right


def describe(
    tensors: Any,
    *,
    engine_format: Any = None,
    object_format: str | None = None,
    block_tokens: int | None = None,
    heads: int | None = None,
    group: int | None = None,
    opaque_tokens: int | None = None,
    **numbers: Unpack[Numbers],
) -> KVLayout:
    """Describe memory objects, which hold one chunk each; or with ``engine_format`` the caches of an engine.

    The last dim of an object holds ``heads * head_dim`` elements, so its shape does not show the heads. If the last
    chunk is shorter, describe it separately.

    Args:
        tensors: with engine_format, nested lists and tensors as the format says. Otherwise a list of objects or of
            their tensors, each ``(2, layers, tokens, heads * head_dim)``, or one plane, ``(1, layers, tokens, width)``
            or ``(layers, tokens, width)``: a latent, or with ``heads`` K and V packed per head. Layerwise: a list with
            one list of objects per layer. One object is one block; one tensor with ``block`` in front is a pool.
        engine_format: an ``EngineKVFormat`` or its name.
        object_format: ``"KV_2LTD"``, ``"KV_MLA_FMT"``, or layerwise ``"KV_T2D"`` or ``"KV_2TD"``; by default the format
            that the objects have, or KV_2LTD.
        block_tokens: tokens per block, if the format has NBBS.
        heads: KV heads in the last dim of an object; left out if tensors have a separate dim for heads.
        group: number of the kernel group to describe, if objects hold several; ``layers`` are then its layers.
        opaque_tokens: tokens per block of an indexer (``NL_X_NB_BSV_BSS``), for objects of one plane that hold such
            blocks one after another in each layer. They are opaque, and become sub-blocks of the object's block.
        numbers: ``layer_start``, ``head_start``, ``layers``, ``part`` (if the content is not K and V, such as
            ``"index"``), ``seams``, as :meth:`kvplan.KVLayout.from_tensors` takes them.

    Raises:
        LayoutError: unknown letters or formats, objects without memory or of several groups, or shapes that do not fit
            the format.

    >>> import numpy as np
    >>> objects = [np.zeros((2, 32, 256, 8 * 128), np.float16) for chunk in range(4)]
    >>> print(describe(objects, heads=8))
    block: kv layer token (head dim) | layer=32 kv=2 block=4 token=256 head=8 dim=128 | float16 on cpu
    >>> print(describe([np.zeros((1024, 1, 576), np.float16)], engine_format="NL_X_NBBS_ONE_HS", block_tokens=64))
    layer: (block token) 1 dim | layer=1 block=16 token=64 dim=576 | float16 on cpu
    >>> keys = [np.zeros((2, 256, 132), np.uint8) for chunk in range(4)]  # four blocks of 64 tokens a chunk and layer
    >>> print(describe(keys, opaque_tokens=64, part="index"))
    block: layer (subblock dim.0) dim.1 | layer=2 block=4 subblock=4 dim=8448 | uint8 on cpu | parts index
    """
    check_numbers(numbers)
    group = optional_integer("group", group, least=0)
    sizes = {} if block_tokens is None else {"token": block_tokens}
    if engine_format is not None:
        if object_format is not None or heads is not None or group is not None or opaque_tokens is not None:
            raise LayoutError("engine_format= describes an engine's caches; object_format, heads and group are of "
                              "memory objects, and so is opaque_tokens")  # fmt: skip
        name = str(getattr(engine_format, "name", engine_format))
        if name == "NL_X_NB_BS_NH_HS" and numbers.get("part", "kv") == "kv":
            raise LayoutError("NL_X_NB_BS_NH_HS lists K and V tensors one by one; describe those of K with part='k', "
                              "those of V with part='v', and merge")  # fmt: skip
        return KVLayout.from_tensors(notation_of(name), tensors, sizes=sizes, **numbers)
    held, depth = tensors, 0
    while isinstance(held, list | tuple) and held:
        held, depth = held[0], depth + 1
    if isinstance(held, list | tuple):
        raise LayoutError("no memory objects; give at least one")
    told = getattr(getattr(getattr(held, "metadata", None), "fmt", None), "name", "KV_2LTD")
    shape = tuple(_tensor(held, group).shape)
    notation = _objects(depth, shape, object_format or told, heads)
    if heads is not None:
        sizes["head"] = heads
    if opaque_tokens is not None:
        notation, sizes = _opaque(notation, shape, opaque_tokens), {"dim.0": opaque_tokens}
    return KVLayout.from_tensors(notation, _unwrapped(tensors, group), sizes=sizes, **numbers)


def _objects(depth: int, shape: tuple[int, ...], name: str, heads: int | None) -> str:
    """Return the notation of one tensor, of a list of objects, or of a layerwise list of lists (depth 2)."""
    formats, nesting = (LAYERWISE, "layer block: ") if depth == 2 else (OBJECTS, "block: " if depth else "")
    if name not in formats or depth > 2:
        given = "one tensor" if not depth else "a list" if depth == 1 else f"lists nested {depth} deep"
        raise LayoutError(
            f"object_format is {name!r} of {given}; a tensor or a list of objects is one of {', '.join(OBJECTS)}, a "
            f"list with one list of objects a layer one of {', '.join(LAYERWISE)}"
        )
    # One plane: a latent, or K and V packed per head. LMCache also names it KV_2LTD, with a leading 1 or without.
    rank = len(shape)
    latent = name == "KV_2LTD" and (rank == 3 or (rank == 4 and shape[0] == 1))
    axes = (OBJECTS["KV_MLA_FMT"] if latent else formats[name]).split()
    plane = "kv" not in axes
    if heads is not None:
        axes.append("(head kv dim)" if plane else "(head dim)")
    else:
        axes += ["dim"] if plane else ["head", "dim"]
    if plane and rank > len(axes) and shape[rank - len(axes) - 1] == 1:
        axes.insert(0, "1")
    if rank == len(axes) + 1 and not depth:
        axes.insert(0, "block")
    dims = " ".join(axes)
    if rank != len(axes):
        hint = "" if heads is not None or plane else "; give heads= where the last dim holds heads and content"
        raise LayoutError(f"shape {shape} is no {name} object, '{dims}'{hint}")
    return nesting + dims


def _opaque(notation: str, shape: tuple[int, ...], tokens: int) -> str:
    """Return the notation of objects whose rows belong to opaque blocks of ``tokens`` tokens each."""
    if not notation.endswith("token dim"):
        raise LayoutError(f"opaque_tokens is of objects of one plane without heads; these are '{notation}'")
    if tokens < 1 or shape[-2] % tokens:
        raise LayoutError(f"opaque_tokens is {tokens}; an object holds {shape[-2]} tokens, which are whole blocks")
    return notation.removesuffix("token dim") + "(subblock dim.0) dim.1"


def _unwrapped(value: Any, group: int | None) -> Any:
    """Return the value with memory objects replaced by their tensors."""
    if isinstance(value, list | tuple):
        return [_unwrapped(item, group) for item in value]
    return _tensor(value, group)


def _tensor(value: Any, group: int | None) -> Any:
    """Return the tensor of a memory object; a tensor is its own."""
    if hasattr(value, "shape"):
        if group is not None:
            raise LayoutError("group= is of memory objects; got tensors, which hold one group each")
        return value
    kind = type(value).__name__
    if not hasattr(value, "get_tensor"):  # objects of several groups raise if their tensor is read
        raise LayoutError(f"expected a memory object or a tensor; got {kind}")
    groups = len(getattr(getattr(value, "metadata", None), "shapes", None) or [None])
    if group is None and groups > 1:
        raise LayoutError(f"{kind} holds {groups} kernel groups one after the other; name one with group=")
    tensor = value.tensor if group is None else value.get_tensor(group)
    if not hasattr(tensor, "shape"):
        raise LayoutError(f"{kind} has no tensor: it was freed, or holds bytes of another kind")
    return tensor

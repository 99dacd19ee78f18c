"""vLLM: its caches, in version 0.33 and, where the shape is the same, in older ones.

Source: vLLM 0.33.0, ``v1/kv_cache_interface.py``, ``v1/kv_cache_layout.py``, ``v1/worker/utils.py``
(``allocate_kv_cache``) and ``v1/attention/backends/``; 0.10.2 to 0.32.0, the same folders (``get_kv_cache_shape``).

In 0.33 every layer is a view ``(B, H, N, C)`` of one allocation: blocks, heads, token slots, content. Its strides show
the storage order. The attention backend decides the meaning of the content, which ``form`` names.

===================  ===================  =====================================================================
form                 a layer's tensor     of
===================  ===================  =====================================================================
``fused``            (B, H, N, C)         0.33, 0.26: K, then V, in the content of each (head, token)
``latent``           (B, 1, N, C)         0.33: MLA, if ``spec.head_size_v`` is 0
``packed``           (B, H, N, C)         0.33: TurboQuant, Octave, UltraQuant: K and V of a row cannot be separated
``whole_blocks``     (B, H, N, C)         0.33: Mamba, indexers, NVFP4: the bytes of a token are not contiguous
``cpu``              (B, H, N, C)         0.23 to 0.33, CPU_ATTN: packed by instruction set; heads of blocks move whole
``head_slots``       (B, 2, N, H * D)     0.33, B12X: slot 0 is K, slot 1 V (``spec.num_head_slots == 2``)
``paged``            (B, 2, N, H * D)     0.29 to 0.33, ROCM_ATTN: K is (H, D / x, N, x), V (H, D, N)
``shuffled``         (B, 2, N, H * D)     0.33, AITER shuffle: K as in ``paged``, V is (H, N / x, D, x)
``planes``           (2, B, N, H, D)      0.10 to 0.22: FlashAttention, Flex, ROCM_AITER_FA; Triton (0.10)
``pages``            (B, 2, N, H, D)      0.10 to 0.20: FlashInfer; Triton (0.20)
``planes_hnd``       (2, B, H, N, D)      0.11 to 0.22, CPU_ATTN: as ``cpu``, in planes of K and of V
``rocm``             (2, B, N, H, D)      0.11 to 0.28, ROCM_ATTN: as ``paged``
``shuffled_planes``  (2, B, N, H, D)      0.17 to 0.22, ROCM_AITER_FA with a shuffled cache: as ``shuffled``
===================  ===================  =====================================================================

Four of them fit a tensor ``(2, ., ., ., D)``, and a wrong one moves wrong bytes wherever heads or tokens are separated:
take that of the attention backend. x is 16 bytes of elements. A layer of ROCM_ATTN whose
``impl._use_interleaved_v_cache`` is set is ``shuffled``: AITER's fused writer stores V so. To move NVFP4 by heads or
tokens, describe it with :mod:`kvplan.backends.quantized`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

from kvplan.backends._tensors import Numbers, check_numbers, check_option, dense_inside, itemsize_of, steps_of
from kvplan.base.values import integer, integers, optional_integer
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.tensors import facts


class Form(NamedTuple):
    """The form of one layer's tensor.

    Attributes:
        shape: dims of the tensor, as text.
        dims: notation of the whole tensor, or of K and of V.
        pair: number of the dim that holds K and V, with extent 2; None without such a dim.
    """

    shape: str
    dims: tuple[str, ...]
    pair: int | None = None

    @property
    def rank(self) -> int:
        """Return the number of dims of a layer's tensor."""
        return self.shape.count(",") + 1

    @property
    def tokens(self) -> int:
        """Return the number of the dim that counts token slots."""
        return self.shape.split(", ").index("N")


_KEYS = "block (head dim.0 token dim.1)"
_VALUES = "block (head dim token)"
_SHUFFLED = "block (head token.0 dim token.1)"
FORMS = {
    "fused": Form("(B, H, N, C)", ("block head token (kv dim)",)),
    "latent": Form("(B, 1, N, C)", ("block 1 token dim",)),
    "packed": Form("(B, H, N, C)", ("block head token dim",)),
    "whole_blocks": Form("(B, H, N, C)", ("block dim.0 dim.1 dim.2",)),
    "cpu": Form("(B, H, N, C)", ("block head dim.0 dim.1",)),
    "head_slots": Form("(B, 2, N, H * D)", ("block kv token (head dim)",), pair=1),
    "paged": Form("(B, 2, N, H * D)", (_KEYS, _VALUES), pair=1),
    "shuffled": Form("(B, 2, N, H * D)", (_KEYS, _SHUFFLED), pair=1),
    "planes": Form("(2, B, N, H, D)", ("kv block token head dim",), pair=0),
    "pages": Form("(B, 2, N, H, D)", ("block kv token head dim",), pair=1),
    "planes_hnd": Form("(2, B, H, N, D)", ("kv block head dim.0 dim.1",), pair=0),
    "rocm": Form("(2, B, N, H, D)", (_KEYS, _VALUES), pair=0),
    "shuffled_planes": Form("(2, B, N, H, D)", (_KEYS, _SHUFFLED), pair=0),
}
_HEADS_IN_ROWS = ("head_slots", "paged", "shuffled")


def describe(
    kv_caches: Any,
    *,
    form: str = "fused",
    head_size_v: int | None = None,
    heads: int | None = None,
    block_tokens: int | None = None,
    names: Sequence[str] | None = None,
    **numbers: Unpack[Numbers],
) -> KVLayout:
    """Describe one KV-cache group by the tensors of its layers.

    Real strides are used, so storage orders of 0.33, padded pages and interleaved layers need no option. Layers may
    differ in shape. Groups share memory: describe each group separately (``names=``), never merge them, and
    ``kvplan.join`` their plans. If two kinds of caches have one layer number (a latent and its indexer), describe them
    separately, too, the extra one with ``part=``, and merge them.

    Args:
        kv_caches: the argument of ``register_kv_caches``, layer name to tensor; or a list of tensors in order of
            layers; or one tensor, of one layer or with an outermost dim for the layers. A layer's number is the only
            integer in its name. A layer at the address of another one is left out.
        form: the form of a layer's tensor, from the table.
        head_size_v: elements of V in the content of ``fused``, if it is not half (the parts are then of two sizes); 0
            makes it a ``latent``.
        heads: KV heads of this rank, for forms that hold heads in one dim with another axis.
        block_tokens: token slots per block of the manager, if the tensor has smaller blocks of the attention kernel.
            Block ids are then the manager's.
        names: the layers to describe, ``KVCacheGroupSpec.layer_names``; by default all layers of the dict.
        numbers: ``layer_start`` (of a list), ``head_start``, ``layers`` (in the order of ``kv_caches`` or of
            ``names``, if these do not show it), ``part`` and ``seams``, as :meth:`kvplan.KVLayout.from_tensors` takes
            them.

    Raises:
        LayoutError: an unknown form, a tensor of a wrong rank, an argument that does not fit the form, a missing
            argument, a name without exactly one number, or two layers with one number.

    >>> import numpy as np
    >>> raw = np.zeros((10, 2, 16, 4, 512), np.int8)  # the storage order BLNHC
    >>> views = {f"model.layers.{k}.self_attn.attn": raw[:, k].swapaxes(1, 2) for k in range(2)}
    >>> print(describe(views))
    layer: block head token (kv dim) | layer=2 kv=2 block=10 token=16 head=4 dim=256 | int8 on cpu
    >>> print(describe([np.zeros((40, 4, 16, 128), np.float16)], block_tokens=64))
    layer: (block token.0) head token.1 (kv dim) | layer=1 kv=2 block=10 token=64 head=4 dim=64 | float16 on cpu
    >>> print(describe([np.zeros((10, 2, 16, 256), np.float16)], form="head_slots", heads=4))
    layer: block kv token (head dim) | layer=1 kv=2 block=10 token=16 head=4 dim=64 | float16 on cpu
    """
    check_numbers(numbers)
    check_option("form", form, FORMS)
    head_size_v = optional_integer("head_size_v", head_size_v, least=0)
    heads = optional_integer("heads", heads, least=1)
    block_tokens = optional_integer("block_tokens", block_tokens, least=1)
    if head_size_v is not None and form != "fused":
        raise LayoutError(f"head_size_v is given for form={form!r}; only 'fused' holds V beside K in one row")
    if (heads is None) == (form in _HEADS_IN_ROWS):
        needs = "needs heads=" if heads is None else "takes no heads="
        raise LayoutError(f"form={form!r} {needs}; {', '.join(map(repr, _HEADS_IN_ROWS))} hold heads in one dim with "
                          "the content, the rest in their own")  # fmt: skip
    if head_size_v == 0:
        form, head_size_v = "latent", None
    caches, layers = _layers(kv_caches, form, names, numbers)
    alike: dict[object, list[int]] = {}
    for k, cache in enumerate(caches):
        alike.setdefault((tuple(cache.shape), steps_of(cache), str(cache.dtype)), []).append(k)
    parts = []
    for held in alike.values():
        for name, dims, tensors, sizes in _parts(form, [caches[k] for k in held], numbers, head_size_v, heads):
            if block_tokens is not None:
                dims, sizes = _manager_blocks(dims, sizes, int(caches[held[0]].shape[FORMS[form].tokens]), block_tokens)
            named = numbers | {"layers": [layers[k] for k in held], "part": name, "layer_start": 0}
            parts.append(KVLayout.from_tensors(f"layer: {dims}", tensors, sizes=sizes, **named))
    return parts[0] if len(parts) == 1 else KVLayout.merge(parts)


def _layers(
    kv_caches: Any, form: str, names: Sequence[str] | None, numbers: Numbers
) -> tuple[list[Any], Sequence[int]]:
    """Return the tensors of the layers, and the numbers of the layers."""
    start, layers = integer("layer_start", numbers.get("layer_start", 0), least=0), numbers.get("layers")
    given = None if layers is None else integers("layers", layers, least=0)
    told: Sequence[int]
    if isinstance(kv_caches, Mapping):
        picked = list(kv_caches if names is None else names)
        for name in picked:
            if name not in kv_caches:
                raise LayoutError(f"no layer {name!r} in kv_caches; it has {', '.join(map(repr, kv_caches))}")
        if start:
            raise LayoutError(f"layer_start is {start}, and the names of kv_caches tell the layers; leave it out")
        caches = [(f"kv_caches[{name!r}]", kv_caches[name]) for name in picked]
        told = [_number(name) for name in picked] if given is None else given
    else:
        if names is not None:
            raise LayoutError(f"names are given and kv_caches is a {type(kv_caches).__name__}; names pick from a dict "
                              "of layer name to tensor")  # fmt: skip
        if hasattr(kv_caches, "shape"):
            kv_caches = list(kv_caches) if len(kv_caches.shape) == FORMS[form].rank + 1 else [kv_caches]
        if not isinstance(kv_caches, list | tuple):
            raise LayoutError(f"kv_caches is a {type(kv_caches).__name__}; give a dict of layer name to tensor, a list "
                              "with one tensor a layer, or one tensor")  # fmt: skip
        caches = [(f"kv_caches[{k}]", cache) for k, cache in enumerate(kv_caches)]
        told = range(start, start + len(caches)) if given is None else given
    if not caches:
        raise LayoutError("kv_caches holds no layer, or names is empty; a layout has at least one layer")
    if len(told) != len(caches):
        raise LayoutError(f"layers are {list(told)}; kv_caches holds {len(caches)}, each with its own number")
    for name, cache in caches:
        _check_shape(name, cache, form)
    if not isinstance(kv_caches, Mapping):
        return [cache for _, cache in caches], told
    return _first_holders(sorted(zip(told, caches, strict=True), key=lambda entry: entry[0]))


def _first_holders(entries: list[tuple[int, tuple[str, Any]]]) -> tuple[list[Any], list[int]]:
    """Leave out layers that share the cache of another one; of these, only the first is described."""
    described: dict[int, str] = {}
    tensors: dict[object, Any] = {}
    for number, (name, cache) in entries:
        place = facts(cache)[:-1]
        if place in tensors:
            continue
        if number in described:
            raise LayoutError(f"{described[number]} and {name} are both layer {number}; describe each kind of layer by "
                              "itself (names=, part=) and merge")  # fmt: skip
        described[number], tensors[place] = name, cache
    return list(tensors.values()), list(described)


def _number(name: str) -> int:
    numbers = [int(word) for word in str(name).split(".") if word.isascii() and word.isdigit()]
    if len(numbers) != 1:
        raise LayoutError(f"layer {name!r} has {len(numbers)} numbers in its name; expected one, as in "
                          "'model.layers.7.self_attn.attn'; otherwise give layers=")  # fmt: skip
    return numbers[0]


def _check_shape(name: str, cache: Any, form: str) -> None:
    expected, pair, rank = FORMS[form].shape, FORMS[form].pair, FORMS[form].rank
    if not hasattr(cache, "shape"):
        raise LayoutError(f"{name} is a {type(cache).__name__}; form={form!r} has tensors {expected} a layer")
    shape = tuple(cache.shape)
    if len(shape) != rank:
        fits = [other for other in FORMS if FORMS[other].rank == len(shape)]
        hint = f"; of {len(shape)} dims are {', '.join(fits)}, by attention backend" if fits else ""
        raise LayoutError(f"{name} has shape {shape}, {len(shape)} dims; form={form!r} is {expected}{hint}")
    if pair is not None and shape[pair] != 2:
        raise LayoutError(f"{name} has shape {shape}, whose dim {pair} is {shape[pair]}; form={form!r} is {expected}, "
                          "with K and V in that dim")  # fmt: skip


_Part = tuple[str, str, list[Any], dict[str, int]]  # part, dims, tensors, sizes


def _parts(form: str, caches: list[Any], numbers: Numbers, head_size_v: int | None, heads: int | None) -> list[_Part]:
    """Return the parts of layers of one shape, in the blocks of the attention kernel."""
    dims, part = FORMS[form].dims, numbers.get("part", "kv")
    sizes = {} if heads is None else {"head": heads}
    k, v = ("k", "v") if part == "kv" else (f"k_{part}", f"v_{part}")
    tokens, last = map(int, caches[0].shape[2:4])
    if len(dims) == 2:  # K in groups of 16 bytes per token, and V transposed, or shuffled in groups of tokens
        x, shuffled, pair = 16 // itemsize_of(caches[0]), dims[1] == _SHUFFLED, FORMS[form].pair
        if shuffled and tokens % x:
            raise LayoutError(f"form={form!r} has blocks of {tokens} token slots; they come in groups of {x}")
        slots = {"token.0": tokens // x, "token.1": x} if shuffled else {"token": tokens}
        sizes = sizes or {"head": last}
        return [
            (k, dims[0], [_page(cache, pair, 0) for cache in caches], sizes | {"token": tokens, "dim.1": x}),
            (v, dims[1], [_page(cache, pair, 1) for cache in caches], sizes | slots),
        ]
    if head_size_v is None:
        return [(part, dims[0], caches, sizes)]
    edge = last - head_size_v
    if not 0 < edge < last:
        raise LayoutError(f"head_size_v is {head_size_v}; a row of {last} elements holds K and V")
    rows = dims[0].replace("(kv dim)", "dim")
    return [(k, rows, [c[..., :edge] for c in caches], sizes), (v, rows, [c[..., edge:] for c in caches], sizes)]


def _page(cache: Any, pair: int | None, kv: int) -> Any:
    """Return K or V of every block, as ``(blocks, elements of a page)``."""
    side = cache[:, kv] if pair else cache[kv]
    if not dense_inside(side):
        raise LayoutError(f"x-packed caches are dense in their last 2 dims; these have shape {tuple(cache.shape)} and "
                          f"strides {steps_of(cache)} (bytes)")  # fmt: skip
    return side.reshape(int(side.shape[0]), -1)  # contiguous, so a view


def _manager_blocks(dims: str, sizes: dict[str, int], tokens: int, block_tokens: int) -> tuple[str, dict[str, int]]:
    """Return the notation of the same tensors in the manager's blocks, each of consecutive blocks of the kernel.

    >>> _manager_blocks("block head (token.0 dim token.1)", {}, 16, 32)
    ('(block token.0) head (token.1 dim token.2)', {'token.0': 2})
    """
    ratio, rest = divmod(block_tokens, tokens)
    if rest:
        raise LayoutError(f"block_tokens is {block_tokens}; the tensor's blocks have {tokens} token slots, and the "
                          f"manager's a multiple of {tokens}")  # fmt: skip
    if ratio == 1:
        return dims, sizes
    if "token" not in dims:
        return dims.replace("block", "(block subblock)", 1), sizes | {"subblock": ratio}
    deeper = {_deeper(axis): size for axis, size in sizes.items()}
    return _deeper(dims).replace("block", "(block token.0)", 1), deeper | {"token.0": ratio}


def _deeper(text: str) -> str:
    """Raise the number of every token factor by one; an unsplit token axis counts as factor 0."""
    return re.sub(r"token(?:\.(\d))?", lambda match: f"token.{int(match[1] or 0) + 1}", text)

"""vLLM: its caches, in version 0.33 and in the generations before it.

Source: vLLM 0.33.0, ``v1/kv_cache_interface.py``, ``v1/worker/utils.py`` (``allocate_kv_cache``),
``v1/attention/backends/`` and ``csrc/cpu/``; 0.10.2 to 0.32.0, the same folders (``get_kv_cache_shape``).

In 0.33 every layer is a view ``(B, H, N, C)`` of one allocation: blocks, heads, token slots, content. Its strides show
the storage order. The attention backend decides the meaning of the content, which ``form`` names.

===================  ===================  =====================================================================
form                 a layer's tensor     of
===================  ===================  =====================================================================
``fused``            (B, H, N, C)         0.33, 0.26: K, then V, in the content of each (head, token)
``latent``           (B, 1, N, C)         0.33: MLA, if ``spec.head_size_v`` is 0
``packed``           (B, H, N, C)         0.33: TurboQuant, Octave, UltraQuant: K and V of a row cannot be separated
``whole_blocks``     (B, H, N, C)         0.33: Mamba, indexers, NVFP4: the bytes of a token are not contiguous
``cpu``              (B, H, N, C)         0.23 to 0.33, CPU_ATTN: all K of a (block, head), then all V, by ``isa``
``head_slots``       (B, 2, N, H * D)     0.33, B12X: slot 0 is K, slot 1 V (``spec.num_head_slots == 2``)
``paged``            (B, 2, N, H * D)     0.29 to 0.33, ROCM_ATTN: K is (H, D / x, N, x), V (H, D, N)
``shuffled``         (B, 2, N, H * D)     0.33, AITER shuffle: K as in ``paged``, V is (H, N / x, D, x)
``planes``           (2, B, N, H, D)      0.10 to 0.22: FlashAttention, Flex, ROCM_AITER_FA; Triton (0.10)
``pages``            (B, 2, N, H, D)      0.10 to 0.20: FlashInfer; Triton (0.20)
``planes_hnd``       (2, B, H, N, D)      0.11 to 0.22: CPU_ATTN: planes of K and of V, by ``isa``
``rocm``             (2, B, N, H, D)      0.11 to 0.28: ROCM_ATTN: as ``paged``; by ``version``, ``paged`` from 0.29
``shuffled_planes``  (2, B, N, H, D)      0.17 to 0.22: ROCM_AITER_FA with a shuffled cache: as ``shuffled``
``rows``             (B, N, H, C)         0.20: FlashAttention DiffKV: as ``fused``, tokens before heads
``paged_planes``     (2, B, N * H * D)    0.10: PagedAttention on CPU and ROCm: as ``paged``
===================  ===================  =====================================================================

x is 16 bytes of elements. A layer of ROCM_ATTN whose ``impl._use_interleaved_v_cache`` is set is ``shuffled``: AITER's
fused writer stores V so. ``isa`` is the instruction set of CPU_ATTN's kernels; inside a (block, head), K and V are

=============================================  ======================  ======================
isa                                            K                       V
=============================================  ======================  ======================
``vec``, ``vec16``, ``rvv``, ``vxe``, ``vsx``  (D, N)                  (N, D)
``neon`` but for bfloat16, ``neon_fmla``       (D, N)                  (N, D)
``amx``                                        (N / 16, D / 2, 16, 2)  (D / 16, N / 2, 16, 2)
``neon_bfmmla``                                (N / 8, D / 4, 8, 4)    (D / 8, N / 4, 8, 4)
``neon_bfmmla``, to 0.30                       (N / 8, D / 4, 8, 4)    (D / 2, N / 4, 2, 4)
not known                                      opaque                  opaque
=============================================  ======================  ======================

A page of NVFP4 is K data, K scales, V data, V scales, each by head and opaque inside: ``"k"``, ``"k_scale"``, ``"v"``,
``"v_scale"``. ``whole_blocks`` treats a cache as NVFP4 if its elements are single bytes, it has several token slots and
an even number of head slots, and a ninth of a row can be scales. Opaque blocks move whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvplan.backends._tensors import check_option, steps_of
from kvplan.backends._vllm_forms import FORMS, Form, Options, check_options, parts_of, rocm_form
from kvplan.backends._vllm_orders import place
from kvplan.base.integers import integer, integers, optional_integer
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.tensors import facts

__all__ = ["FORMS", "describe", "place"]


def describe(
    kv_caches: Any,
    *,
    form: str = "fused",
    head_size_v: int | None = None,
    heads: int | None = None,
    block_tokens: int | None = None,
    isa: str | None = None,
    version: str | None = None,
    names: Sequence[str] | None = None,
    layer_start: int = 0,
    head_start: int = 0,
    layers: Sequence[int] | None = None,
    part: str = "kv",
    seams: Sequence[int] = (),
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
        head_size_v: elements of V in the content of ``fused`` and ``rows``, if it is not half (the parts are then
            of two sizes); 0 makes ``fused`` a ``latent``.
        heads: KV heads of this rank, for forms that hold heads in one dim with another axis.
        block_tokens: token slots per block of the manager, if the tensor has smaller blocks of the attention kernel.
            Block ids are then the manager's. ``paged_planes`` always needs it.
        isa: the instruction set of the kernels of ``cpu`` and ``planes_hnd``, an attention layer's ``isa``; by default
            from vLLM, if this process has loaded it and the cache is not fp8. If it is unknown, blocks are opaque. It
            is unknown for ``neon`` with bfloat16, where the build of vLLM decides.
        version: version of vLLM, as text; by default that of the vLLM that this process has loaded. ``rocm`` needs
            it, and ``cpu`` with ``isa="neon_bfmmla"``.
        names: the layers to describe, ``KVCacheGroupSpec.layer_names``; by default all layers of the dict.
        layer_start: number of the first layer of a list.
        head_start: global number of this rank's first KV head.
        layers: number of every layer, in the order of ``kv_caches`` or of ``names``, if these do not show it.
        part: ``"kv"``, or the name of an extra. For separate K and V, ``"scale"`` makes ``"k_scale"``, ``"v_scale"``.
        seams: addresses that no descriptor may cross.

    Raises:
        LayoutError: an unknown form, a tensor of a wrong rank, an argument that does not fit the form, a missing
            argument, a name without exactly one number, or two layers with one number.

    >>> import numpy as np
    >>> raw = np.zeros(2 * 10 * 32768, np.int8)
    >>> views = place(raw, layers=2, blocks=10, heads=4, tokens=16, row_nbytes=512, order="BLNHC")
    >>> print(describe({f"model.layers.{k}.self_attn.attn": view for k, view in enumerate(views)}))
    layer: block head token (kv dim) | layer=2 kv=2 block=10 token=16 head=4 dim=256 | int8 on cpu
    >>> print(describe([np.zeros((40, 4, 16, 128), np.float16)], block_tokens=64))
    layer: (block token.0) head token.1 (kv dim) | layer=1 kv=2 block=10 token=64 head=4 dim=64 | float16 on cpu
    >>> print(describe([np.zeros((10, 2, 16, 256), np.float16)], form="head_slots", heads=4))
    layer: block kv token (head dim) | layer=1 kv=2 block=10 token=16 head=4 dim=64 | float16 on cpu
    >>> cpu = describe([np.zeros((10, 4, 32, 128), np.float16)], form="cpu", isa="vec")
    >>> cpu.notation
    'layer: block head (dim token) + layer: block head (token dim)'
    >>> cpu.address(layer=0, part="k", token=1) - cpu.address(layer=0, part="k")
    2
    """
    check_option("form", form, FORMS)
    options = Options(
        optional_integer("head_size_v", head_size_v, least=0), optional_integer("heads", heads, least=1),
        optional_integer("block_tokens", block_tokens, least=1), isa, version,
    )  # fmt: skip
    row = FORMS[form]
    if form == "rocm":
        row, options = FORMS[rocm_form(version)], options._replace(version=None)
    check_options(row, options)
    if form == "fused" and head_size_v == 0:
        row, options = FORMS["latent"], options._replace(head_size_v=None)
    caches, numbers = _layers(kv_caches, row, names, layer_start, layers)
    alike: dict[object, list[int]] = {}
    for k, cache in enumerate(caches):
        alike.setdefault((tuple(cache.shape), steps_of(cache), str(cache.dtype)), []).append(k)
    found = [
        KVLayout.from_tensors(
            f"layer: {dims}", tensors, sizes=sizes, layers=[numbers[k] for k in held], head_start=head_start,
            part=name, seams=seams
        )
        for held in alike.values()
        for name, dims, tensors, sizes in parts_of(row, [caches[k] for k in held], part, options)
    ]  # fmt: skip
    return found[0] if len(found) == 1 else KVLayout.merge(found)


def _layers(
    kv_caches: Any, form: Form, names: Sequence[str] | None, layer_start: int, layers: Sequence[int] | None
) -> tuple[list[Any], list[int]]:
    """Return the tensors of the layers, and the numbers of the layers."""
    if isinstance(kv_caches, Mapping):
        return _named_layers(kv_caches, form, names, layer_start, layers)
    if names is not None:
        raise LayoutError(f"names are given and kv_caches is a {type(kv_caches).__name__}; names pick from a dict of "
                          "layer name to tensor")  # fmt: skip
    rank = len(kv_caches.shape) if hasattr(kv_caches, "shape") else None
    if rank == form.rank:
        kv_caches = [kv_caches]
    elif rank == form.rank + 1:
        kv_caches = [kv_caches[k] for k in range(kv_caches.shape[0])]
    elif rank is not None:
        _check_rank("kv_caches", kv_caches, form)
    elif not isinstance(kv_caches, list | tuple):
        raise LayoutError(f"kv_caches is a {type(kv_caches).__name__}; give a dict of layer name to tensor, a list "
                          "with one tensor a layer, or one tensor")  # fmt: skip
    for k, cache in enumerate(kv_caches):
        _check_rank(f"kv_caches[{k}]", cache, form)
    return list(kv_caches), _numbers(layers, layer_start, len(kv_caches))


def _named_layers(
    kv_caches: Mapping[str, Any],
    form: Form,
    names: Sequence[str] | None,
    layer_start: int,
    layers: Sequence[int] | None,
) -> tuple[list[Any], list[int]]:
    picked = list(kv_caches if names is None else names)
    if not picked:
        raise LayoutError("kv_caches holds no layer, or names is empty; a layout has at least one layer")
    for name in picked:
        if name not in kv_caches:
            raise LayoutError(f"no layer {name!r} in kv_caches; it has {', '.join(map(repr, kv_caches))}")
        _check_rank(f"kv_caches[{name!r}]", kv_caches[name], form)
    if layer_start:
        raise LayoutError(f"layer_start is {layer_start}, and the names of kv_caches tell the layers; leave it out")
    given = [_number(name) for name in picked] if layers is None else _numbers(layers, 0, len(picked))
    described: dict[int, str] = {}
    tensors: dict[object, Any] = {}
    for number, name in sorted(zip(given, picked, strict=True)):
        if (place := facts(kv_caches[name])[:-1]) in tensors:
            continue  # layers that share a cache, by its address: only the first one is described
        if number in described:
            raise LayoutError(f"{described[number]!r} and {name!r} are both layer {number}; describe each kind of "
                              "layer by itself (names=, part=) and merge")  # fmt: skip
        described[number], tensors[place] = name, kv_caches[name]
    return list(tensors.values()), list(described)


def _numbers(layers: Sequence[int] | None, layer_start: int, count: int) -> list[int]:
    first = integer("layer_start", layer_start, least=0)
    numbers = list(range(first, first + count)) if layers is None else list(integers("layers", layers, least=0))
    if not count:
        raise LayoutError("kv_caches holds no layer; a layout has at least one")
    if len(numbers) != count:
        raise LayoutError(f"layers are {numbers}; kv_caches holds {count}, each with its own number")
    return numbers


def _number(name: str) -> int:
    numbers = [int(word) for word in str(name).split(".") if word.isascii() and word.isdigit()]
    if len(numbers) != 1:
        raise LayoutError(f"layer {name!r} has {len(numbers)} numbers in its name; expected one, as in "
                          "'model.layers.7.self_attn.attn'; otherwise give layers=")  # fmt: skip
    return numbers[0]


def _check_rank(name: str, cache: Any, form: Form) -> None:
    if not hasattr(cache, "shape"):
        raise LayoutError(f"{name} is a {type(cache).__name__}; form={form.name!r} has tensors {form.shape} a layer")
    shape = tuple(cache.shape)
    if len(shape) != form.rank:
        fits = [other for other in FORMS if FORMS[other].rank == len(shape)]
        hint = f"; of {len(shape)} dims are {', '.join(fits)}" if fits else ""
        raise LayoutError(f"{name} has shape {shape}, {len(shape)} dims; form={form.name!r} is {form.shape}{hint}")
    if form.pair is not None and shape[form.pair] != 2:
        raise LayoutError(f"{name} has shape {shape}, whose dim {form.pair} is {shape[form.pair]}; form={form.name!r} "
                          f"is {form.shape}, with K and V in that dim")  # fmt: skip

"""Forms of the tensors of vLLM's attention backends, and their notations; a table is in :mod:`kvplan.backends.vllm`.

Source of NVFP4's pages: vLLM 0.33.0, ``v1/attention/backends/flashinfer.py`` (``_nvfp4_kv_views``),
``utils/torch_utils.py`` (``nvfp4_split_data_scale``), ``csrc/nvfp4_kv_cache_kernels.cu``.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any, NamedTuple

from kvplan.backends._tensors import dense, itemsize_of, kv_names, steps_of
from kvplan.backends._vllm_cpu import packing_of, version_of
from kvplan.errors import LayoutError


class Options(NamedTuple):
    """Arguments of ``describe`` that depend on the form; None where they are left out."""

    head_size_v: int | None = None
    heads: int | None = None
    block_tokens: int | None = None
    isa: str | None = None
    version: str | None = None


class Form(NamedTuple):
    """The form of one layer's tensor.

    Attributes:
        name: the form's name.
        shape: dims of the tensor, as text.
        dims: notation of the whole tensor, or of K and of V; empty if the form alone does not decide.
        tokens: number of the dim that counts token slots; None without such a dim.
        pair: number of the dim that holds K and V, with extent 2; None without such a dim.
    """

    name: str
    shape: str
    dims: tuple[str, ...]
    tokens: int | None = 2
    pair: int | None = None

    @property
    def rank(self) -> int:
        """Return the number of dims of a layer's tensor."""
        return self.shape.count(",") + 1

    @property
    def takes_heads(self) -> bool:
        """Return whether heads share a dim with another axis, so that the shape does not show their number."""
        return any("(head" in dims for dims in self.dims) and ", H," not in self.shape


_KEYS = "block (head dim.0 token dim.1)"
_VALUES = "block (head dim token)"
_SHUFFLED = "block (head token.0 dim token.1)"

_FORMS = (
    Form("fused", "(B, H, N, C)", ("block head token (kv dim)",)),
    Form("latent", "(B, 1, N, C)", ("block 1 token dim",)),
    Form("packed", "(B, H, N, C)", ("block head token dim",)),
    Form("whole_blocks", "(B, H, N, C)", ("block dim.0 dim.1 dim.2",)),
    Form("cpu", "(B, H, N, C)", ()),
    Form("head_slots", "(B, 2, N, H * D)", ("block kv token (head dim)",), pair=1),
    Form("paged", "(B, 2, N, H * D)", (_KEYS, _VALUES), pair=1),
    Form("shuffled", "(B, 2, N, H * D)", (_KEYS, _SHUFFLED), pair=1),
    Form("planes", "(2, B, N, H, D)", ("kv block token head dim",), pair=0),
    Form("pages", "(B, 2, N, H, D)", ("block kv token head dim",), pair=1),
    Form("planes_hnd", "(2, B, H, N, D)", (), tokens=3, pair=0),
    Form("rocm", "(2, B, N, H, D)", (_KEYS, _VALUES), pair=0),
    Form("shuffled_planes", "(2, B, N, H, D)", (_KEYS, _SHUFFLED), pair=0),
    Form("rows", "(B, N, H, C)", ("block token head (kv dim)",), tokens=1),
    Form("paged_planes", "(2, B, N * H * D)", (_KEYS, _VALUES), tokens=None, pair=0),
)
FORMS = {form.name: form for form in _FORMS}

CPU_FORMS = ("cpu", "planes_hnd")
ROCM_CHANGED = (0, 29)  # from here on, K and V are two head slots of a block; before, two planes

# Argument -> the forms that it is for, and why.
_ONLY = {
    "head_size_v": (("fused", "rows"), "hold V beside K in one row"),
    "isa": (CPU_FORMS, "(CPU_ATTN) depend on it"),
    "version": (("rocm", *CPU_FORMS), "(ROCM_ATTN, CPU_ATTN) depend on it"),
}


def check_options(form: Form, options: Options) -> None:
    """Raise LayoutError if arguments of ``describe`` do not fit the form."""
    for name, (forms, reason) in _ONLY.items():
        if getattr(options, name) is not None and form.name not in forms:
            only = ", ".join(map(repr, forms))
            raise LayoutError(f"{name} is given for form={form.name!r}; only {only} {reason}")
    if (options.heads is None) == form.takes_heads:
        held = ", ".join(repr(name) for name, other in FORMS.items() if other.takes_heads)
        needs = "needs heads=" if options.heads is None else "takes no heads="
        raise LayoutError(
            f"form={form.name!r} {needs}; {held} hold heads in one dim with others, the rest in their own"
        )
    if form.name == "paged_planes" and options.block_tokens is None:
        raise LayoutError("form='paged_planes' needs block_tokens=: the shape (2, B, N * H * D) does not tell")


def rocm_form(version: str | None) -> str:
    """Return the form of ROCM_ATTN in a version of vLLM.

    >>> rocm_form("0.26.0"), rocm_form("0.33.0")
    ('rocm', 'paged')
    """
    known = version_of(version)
    if known is None:
        raise LayoutError("form='rocm' needs version=, of vLLM: to 0.28 a layer of ROCM_ATTN is (2, B, N, H, D), from "
                          "0.29 on (B, 2, N, H * D)")  # fmt: skip
    return "paged" if known >= ROCM_CHANGED else "rocm"


_Part = tuple[str, str, list[Any], dict[str, int]]  # part, dims, tensors, sizes


def parts_of(form: Form, caches: list[Any], part: str, options: Options) -> list[_Part]:
    """Return the parts of a form, each with its notation and tensors."""
    shape, block_tokens = tuple(map(int, caches[0].shape)), options.block_tokens
    tokens = block_tokens if form.tokens is None else shape[form.tokens]
    parts = _kernel_parts(form, caches, part, options, tokens)
    if block_tokens is None or tokens is None or block_tokens == tokens:
        return parts
    if block_tokens % tokens:
        raise LayoutError(f"block_tokens is {block_tokens}; the tensor's blocks have {tokens} token slots, and the "
                          f"manager's a multiple of {tokens}")  # fmt: skip
    return [_manager_blocks(one, block_tokens // tokens, form) for one in parts]


def _kernel_parts(form: Form, caches: list[Any], part: str, options: Options, tokens: int | None) -> list[_Part]:
    """Return the parts in the blocks of the attention kernel."""
    shape, names = tuple(map(int, caches[0].shape)), kv_names(part)
    sizes = {} if options.heads is None else {"head": options.heads}
    if form.name in CPU_FORMS:
        return _cpu_parts(form, caches, names, options)
    if form.name == "whole_blocks" and holds_nvfp4(shape, itemsize_of(caches[0])):
        return nvfp4_parts(caches, names)
    if len(form.dims) == 2:
        assert tokens is not None
        return _x_packed_parts(form, caches, names, tokens, sizes or ({"head": shape[3]} if len(shape) == 5 else {}))
    if options.head_size_v is None:
        return [(part, form.dims[0], caches, sizes)]
    content, edge = shape[-1], shape[-1] - options.head_size_v
    if not 0 < edge < content:
        raise LayoutError(f"head_size_v is {options.head_size_v}; a row of {content} elements holds K and V")
    halves = [cache[..., :edge] for cache in caches], [cache[..., edge:] for cache in caches]
    return [
        (name, form.dims[0].replace("(kv dim)", "dim"), half, sizes) for name, half in zip(names, halves, strict=True)
    ]


def _cpu_parts(form: Form, caches: list[Any], names: tuple[str, str], options: Options) -> list[_Part]:
    """Separate K and V of CPU_ATTN. In one tensor, the first half of the rows of each (block, head) is K."""
    fused = form.name == "cpu"
    tokens, content = map(int, caches[0].shape[-2:])
    if fused and content % 2:
        raise LayoutError(f"form='cpu' has rows of {content} elements; they hold K and V, which are of one size")
    dim = content // 2 if fused else content
    packing = packing_of(
        options.isa, version_of(options.version), caches[0].dtype, itemsize=itemsize_of(caches[0]), tokens=tokens,
        dim=dim, planes=not fused,
    )  # fmt: skip
    for cache in caches:
        check_dense(form.name, cache)
    halves: tuple[list[Any], list[Any]] = [], []
    for cache in caches:
        for kv, half in enumerate(halves):
            side = cache if fused else cache[kv]
            rows = side.reshape(int(side.shape[0]), int(side.shape[1]), -1)  # contiguous, so a view
            half.append(rows[..., kv * tokens * dim : (kv + 1) * tokens * dim] if fused else rows)
    sides = zip(names, packing.sides(tokens), halves, strict=True)
    return [(name, f"block head ({axes})", half, sizes) for name, (axes, sizes), half in sides]


def _x_packed_parts(
    form: Form, caches: list[Any], names: tuple[str, str], tokens: int, sizes: dict[str, int]
) -> list[_Part]:
    """Separate K, in groups of 16 bytes per token, and V, which is transposed or shuffled in groups of tokens."""
    x = 16 // itemsize_of(caches[0])
    keys, values = ([_page(cache, form, kv) for cache in caches] for kv in (0, 1))
    shuffled = form.dims[1] == _SHUFFLED
    if shuffled and tokens % x:
        raise LayoutError(
            f"form={form.name!r} has blocks of {tokens} token slots; they come in groups of {x}, 16 bytes"
        )
    v_sizes = {"token.0": tokens // x, "token.1": x} if shuffled else {"token": tokens}
    return [
        (names[0], form.dims[0], keys, sizes | {"token": tokens, "dim.1": x}),
        (names[1], form.dims[1], values, sizes | v_sizes),
    ]


def _manager_blocks(part: _Part, ratio: int, form: Form) -> _Part:
    """Describe the same tensors in the manager's blocks, each of ``ratio`` consecutive blocks of the kernel."""
    name, dims, tensors, sizes = part
    if "token" in dims:
        dims = _one_deeper(dims).replace("block", "(block token.0)", 1)
        return name, dims, tensors, {_one_deeper(axis): size for axis, size in sizes.items()} | {"token.0": ratio}
    if form.name == "whole_blocks":
        return name, dims.replace("block", "(block subblock)", 1), tensors, sizes | {"subblock": ratio}
    # Opaque blocks of CPU_ATTN count as content.
    return name, dims.replace("(dim)", "dim.1").replace("block", "(block dim.0)", 1), tensors, {"dim.0": ratio}


def _one_deeper(text: str) -> str:
    """Raise the number of every token factor by one; an unsplit token axis counts as factor 0.

    >>> _one_deeper("block head (token.0 dim.0 token.1 dim.1)"), _one_deeper("token")
    ('block head (token.1 dim.0 token.2 dim.1)', 'token.1')
    """
    return re.sub(r"token(?:\.(\d))?", lambda match: f"token.{int(match[1] or 0) + 1}", text)


def _page(cache: Any, form: Form, kv: int) -> Any:
    """Return K or V of every block, as ``(blocks, elements of a page)``."""
    side = cache[kv] if form.pair == 0 else cache[:, kv]
    if len(side.shape) == 2:
        return side
    check_dense("x-packed", side, dims=len(side.shape) - 1)
    return side.reshape(int(side.shape[0]), -1)  # contiguous, so a view


def check_dense(form: str, cache: Any, *, dims: int = 2) -> None:
    """Check that the last dims are contiguous.

    Raises:
        LayoutError: a stride leaves a gap, or permutes the dims.
    """
    shape, steps = tuple(map(int, cache.shape[-dims:])), steps_of(cache)[-dims:]
    if not dense(shape, steps, itemsize_of(cache)):
        expected = tuple(itemsize_of(cache) * prod(shape[k + 1 :]) for k in range(dims))
        raise LayoutError(f"the last {dims} dims, {shape}, have strides {steps} (bytes); {form} caches are dense "
                          f"there, {expected}, as in LBHNC")  # fmt: skip


def holds_nvfp4(shape: tuple[int, ...], itemsize: int) -> bool:
    """Return whether ``(B, H, N, C)`` is NVFP4: K and V have a slot per head, and a ninth of their bytes are scales.

    A page of one slot or of one row has only one order, so the answer does not matter for it.

    >>> holds_nvfp4((10, 16, 16, 72), 1), holds_nvfp4((10, 1, 64, 132), 1)
    (True, False)
    """
    _, slots, tokens, content = shape
    return itemsize == 1 and slots > 1 and slots % 2 == 0 and tokens > 1 and content % 9 == 0


def nvfp4_parts(caches: list[Any], names: tuple[str, str]) -> list[tuple[str, str, list[Any], dict[str, int]]]:
    """Cut every page into K data, K scales, V data and V scales, by head; each of them is opaque.

    A page holds these four parts one after the other. The strides of the page show whether heads or tokens are the
    outer axis of each part. Tokens are not separated: kernels of compute capability 10 keep V's scales
    in groups of four.

    Raises:
        LayoutError: a page is not contiguous.
    """
    shape, steps = tuple(map(int, caches[0].shape)), steps_of(caches[0])
    heads, tokens, content = shape[1] // 2, *shape[2:]
    if dense(shape[1:], steps[1:], 1):
        order, pages = "head dim.0 dim.1", caches
    elif dense([shape[k] for k in (2, 1, 3)], [steps[k] for k in (2, 1, 3)], 1):
        order, pages = "dim.0 head dim.1", [cache.swapaxes(1, 2) for cache in caches]
    else:
        raise LayoutError(f"form='whole_blocks' has an NVFP4 cache of shape {shape} and strides {steps}; its pages are "
                          "dense, as in LBHNC, LBNHC, BLHNC and BLNHC")  # fmt: skip
    pages = [page.reshape(int(page.shape[0]), -1) for page in pages]  # contiguous, so a view
    scale = content // 9
    found, start = [], 0
    for name in names:
        for suffix, row in (("", content - scale), ("_scale", scale)):
            stop = start + heads * tokens * row
            found.append((name + suffix, f"block ({order})", [page[:, start:stop] for page in pages],
                          {"head": heads, "dim.0": tokens, "dim.1": row}))  # fmt: skip
            start = stop
    return found

"""Forms of the tensors of vLLM's attention backends, and their notations; a table is in :mod:`kvplan.backends.vllm`."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvplan.backends._tensors import itemsize_of, kv_names
from kvplan.backends._vllm_cpu import packing_of, version_of
from kvplan.backends._vllm_pages import check_dense, holds_nvfp4, nvfp4_parts
from kvplan.errors import LayoutError


class Form(NamedTuple):
    """The form of one layer's tensor.

    Attributes:
        shape: dims of the tensor, as text.
        dims: notation of the whole tensor, or of K and of V; empty if the form alone does not decide.
        tokens: number of the dim that counts token slots; None without such a dim.
        pair: number of the dim that holds K and V, with extent 2; None without such a dim.
    """

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

FORMS = {
    "fused": Form("(B, H, N, C)", ("block head token (kv dim)",)),
    "latent": Form("(B, 1, N, C)", ("block 1 token dim",)),
    "packed": Form("(B, H, N, C)", ("block head token dim",)),
    "whole_blocks": Form("(B, H, N, C)", ("block dim.0 dim.1 dim.2",), tokens=None),
    "cpu": Form("(B, H, N, C)", ()),
    "head_slots": Form("(B, 2, N, H * D)", ("block kv token (head dim)",), pair=1),
    "paged": Form("(B, 2, N, H * D)", (_KEYS, _VALUES), pair=1),
    "shuffled": Form("(B, 2, N, H * D)", (_KEYS, _SHUFFLED), pair=1),
    "planes": Form("(2, B, N, H, D)", ("kv block token head dim",), pair=0),
    "pages": Form("(B, 2, N, H, D)", ("block kv token head dim",), pair=1),
    "planes_hnd": Form("(2, B, H, N, D)", (), tokens=3, pair=0),
    "rocm": Form("(2, B, N, H, D)", (_KEYS, _VALUES), pair=0),
    "shuffled_planes": Form("(2, B, N, H, D)", (_KEYS, _SHUFFLED), pair=0),
    "rows": Form("(B, N, H, C)", ("block token head (kv dim)",), tokens=1),
    "paged_planes": Form("(2, B, N * H * D)", (_KEYS, _VALUES), tokens=None, pair=0),
}

CPU_FORMS = ("cpu", "planes_hnd")
ROCM_CHANGED = (0, 29)  # from here on, K and V are two head slots of a block; before, two planes


def check_options(
    form: str,
    row: Form,
    head_size_v: int | None,
    heads: int | None,
    block_tokens: int | None,
    isa: str | None,
    version: str | None,
) -> None:
    """Raise LayoutError if arguments of ``describe`` do not fit the form."""
    if head_size_v is not None and form not in ("fused", "rows"):
        raise LayoutError(f"head_size_v is given for form={form!r}; only 'fused' and 'rows' hold V beside K in one row")
    if isa is not None and form not in CPU_FORMS:
        raise LayoutError(f"isa is given for form={form!r}; only 'cpu' and 'planes_hnd' (CPU_ATTN) depend on it")
    if version is not None and form not in (*CPU_FORMS, "rocm"):
        raise LayoutError(f"version is given for form={form!r}; only 'rocm' (ROCM_ATTN), 'cpu' and 'planes_hnd' "
                          "(CPU_ATTN) depend on it")  # fmt: skip
    if (heads is None) == row.takes_heads:
        held = ", ".join(repr(name) for name, other in FORMS.items() if other.takes_heads)
        needs = "needs heads=" if heads is None else "takes no heads="
        raise LayoutError(f"form={form!r} {needs}; {held} hold heads in one dim with others, the rest in their own")
    if form == "paged_planes" and block_tokens is None:
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


def parts_of(
    form: str,
    row: Form,
    caches: list[Any],
    part: str,
    head_size_v: int | None,
    heads: int | None,
    block_tokens: int | None,
    isa: str | None,
    version: str | None,
) -> list[_Part]:
    """Return the parts of a form, each with its notation and tensors."""
    shape = tuple(map(int, caches[0].shape))
    tokens = block_tokens if row.tokens is None else shape[row.tokens]
    sizes = {} if heads is None else {"head": heads}
    names = kv_names(part)
    if form in CPU_FORMS:
        parts = _cpu_parts(form, caches, names, isa, version)
    elif form == "whole_blocks" and holds_nvfp4(shape, itemsize_of(caches[0])):
        parts = nvfp4_parts(caches, names)
    elif len(row.dims) == 2:
        assert tokens is not None
        parts = _x_packed_parts(row, caches, names, tokens, sizes or ({"head": shape[3]} if len(shape) == 5 else {}))
    elif head_size_v is not None:
        content = shape[-1]
        if head_size_v >= content or head_size_v == 0:
            raise LayoutError(f"head_size_v is {head_size_v}; a row of {content} elements holds K and V")
        dims = row.dims[0].replace("(kv dim)", "dim")
        edge = content - head_size_v
        parts = [
            (names[0], dims, [cache[..., :edge] for cache in caches], sizes),
            (names[1], dims, [cache[..., edge:] for cache in caches], sizes),
        ]
    else:
        parts = [(part, row.dims[0], caches, sizes)]
    if form == "whole_blocks" and block_tokens is not None:
        return [_opaque_blocks(one, block_tokens, int(shape[2])) for one in parts]
    if row.tokens is None or block_tokens is None or tokens is None or block_tokens == tokens:
        return parts
    if block_tokens % tokens:
        raise LayoutError(f"block_tokens is {block_tokens}; the tensor's blocks have {tokens} token slots, and the "
                          "manager's are a multiple of that")  # fmt: skip
    return [_manager_blocks(one, block_tokens // tokens) for one in parts]


def _cpu_parts(
    form: str, caches: list[Any], names: tuple[str, str], isa: str | None, version: str | None
) -> list[_Part]:
    """Separate K and V of CPU_ATTN. In one tensor, the first half of the rows of each (block, head) is K."""
    fused = form == "cpu"
    tokens, content = map(int, caches[0].shape[-2:])
    if fused and content % 2:
        raise LayoutError(f"form='cpu' has rows of {content} elements; they hold K and V, which are of one size")
    dim = content // 2 if fused else content
    packing = packing_of(isa, version_of(version), caches[0].dtype, itemsize=itemsize_of(caches[0]), tokens=tokens,
                         dim=dim, planes=not fused)  # fmt: skip
    for cache in caches:
        check_dense(form, cache)
    halves: tuple[list[Any], list[Any]] = [], []
    for cache in caches:
        for kv, half in enumerate(halves):
            side = cache if fused else cache[kv]
            rows = side.reshape(int(side.shape[0]), int(side.shape[1]), -1)  # contiguous, so a view
            half.append(rows[..., kv * tokens * dim : (kv + 1) * tokens * dim] if fused else rows)
    sides = zip(names, packing.sides(tokens), halves, strict=True)
    return [(name, f"block head ({axes})", half, sizes) for name, (axes, sizes), half in sides]


def _x_packed_parts(
    row: Form, caches: list[Any], names: tuple[str, str], tokens: int, sizes: dict[str, int]
) -> list[_Part]:
    """Separate K, in groups of 16 bytes per token, and V, which is transposed or shuffled in groups of tokens."""
    x = 16 // itemsize_of(caches[0])
    keys, values = ([_page(cache, row, kv) for cache in caches] for kv in (0, 1))
    shuffled = row.dims[1] == _SHUFFLED
    if shuffled and tokens % x:
        form = next(name for name, other in FORMS.items() if other is row)
        raise LayoutError(f"form={form!r} has blocks of {tokens} token slots; they come in groups of {x}, 16 bytes")
    v_sizes = {"token.0": tokens // x, "token.1": x} if shuffled else {"token": tokens}
    return [
        (names[0], row.dims[0], keys, sizes | {"token": tokens, "dim.1": x}),
        (names[1], row.dims[1], values, sizes | v_sizes),
    ]


def _manager_blocks(part: _Part, ratio: int) -> _Part:
    """Describe the same tensors in the manager's blocks, each of ``ratio`` consecutive blocks of the kernel."""
    name, dims, tensors, sizes = part
    if "token" not in dims:  # opaque: the blocks of the kernel count as content
        return name, dims.replace("(dim)", "dim.1").replace("block", "(block dim.0)", 1), tensors, {"dim.0": ratio}
    dims = _one_deeper(dims).replace("block", "(block token.0)", 1)
    return name, dims, tensors, {_one_deeper(axis): size for axis, size in sizes.items()} | {"token.0": ratio}


def _opaque_blocks(part: _Part, block_tokens: int, tokens: int) -> _Part:
    """Describe the same tensors in the manager's blocks. Opaque blocks of the kernel are sub-blocks of them."""
    name, dims, tensors, sizes = part
    if block_tokens % tokens:
        raise LayoutError(f"block_tokens is {block_tokens}; the tensor's blocks are of {tokens} tokens, and the "
                          "manager's are a multiple of that")  # fmt: skip
    ratio = block_tokens // tokens
    if ratio == 1:
        return part
    if "token" in dims:
        return _manager_blocks(part, ratio)
    return name, dims.replace("block", "(block subblock)", 1), tensors, sizes | {"subblock": ratio}


def _one_deeper(text: str) -> str:
    """Raise the number of every token factor by one; an unsplit token axis counts as factor 0.

    >>> _one_deeper("block head (token.0 dim.0 token.1 dim.1)"), _one_deeper("token")
    ('block head (token.1 dim.0 token.2 dim.1)', 'token.1')
    """
    return re.sub(r"token(?:\.(\d))?", lambda match: f"token.{int(match[1] or 0) + 1}", text)


def _page(cache: Any, row: Form, kv: int) -> Any:
    """Return K or V of every block, as ``(blocks, elements of a page)``."""
    side = cache[kv] if row.pair == 0 else cache[:, kv]
    if len(side.shape) == 2:
        return side
    check_dense("x-packed", side, dims=len(side.shape) - 1)
    return side.reshape(int(side.shape[0]), -1)  # contiguous, so a view

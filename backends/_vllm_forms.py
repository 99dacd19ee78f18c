"""What the tensors of vLLM's attention backends hold; the table stands in :mod:`kvplan.backends.vllm`."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvplan.errors import LayoutError


class Form(NamedTuple):
    """What one layer's tensor is.

    Attributes:
        shape: its dims, as text.
        dims: notation of the whole tensor, or of K and of V.
        tokens: which dim counts token slots; None where none does.
        pair: which dim counts K and V and has extent 2; None where none does.
    """

    shape: str
    dims: tuple[str, ...]
    tokens: int | None = 2
    pair: int | None = None

    @property
    def rank(self) -> int:
        """Number of dims of a layer's tensor."""
        return self.shape.count(",") + 1

    @property
    def takes_heads(self) -> bool:
        """Whether heads share a dim with others, so that the shape does not count them."""
        return any("(head" in dims for dims in self.dims)


_KEYS = "block (head dim.0 token dim.1)"

FORMS = {
    "fused": Form("(B, H, N, C)", ("block head token (kv dim)",)),
    "latent": Form("(B, 1, N, C)", ("block 1 token dim",)),
    "packed": Form("(B, H, N, C)", ("block head token dim",)),
    "whole_blocks": Form("(B, H, N, C)", ("block dim.0 dim.1 dim.2",), tokens=None),
    "cpu": Form("(B, H, N, C)", ("block head (kv token.0) (token.1 dim)",)),
    "head_slots": Form("(B, 2, N, H * D)", ("block kv token (head dim)",), pair=1),
    "paged": Form("(B, 2, N, H * D)", (_KEYS, "block (head dim token)"), pair=1),
    "shuffled": Form("(B, 2, N, H * D)", (_KEYS, "block (head token.0 dim token.1)"), pair=1),
    "planes": Form("(2, B, N, H, D)", ("kv block token head dim",), pair=0),
    "pages": Form("(B, 2, N, H, D)", ("block kv token head dim",), pair=1),
    "planes_hnd": Form("(2, B, H, N, D)", ("kv block head token dim",), tokens=3, pair=0),
    "rows": Form("(B, N, H, C)", ("block token head (kv dim)",), tokens=1),
    "paged_planes": Form("(2, B, N * H * D)", (_KEYS, "block (head dim token)"), tokens=None, pair=0),
}


def check_options(form: str, row: Form, head_size_v: int | None, heads: int | None, block_tokens: int | None) -> None:
    """Refuse a describe() whose arguments and form do not go together."""
    if head_size_v is not None and form not in ("fused", "rows"):
        raise LayoutError(f"head_size_v is given for form={form!r}; only 'fused' and 'rows' hold V beside K in one row")
    if (heads is None) == row.takes_heads:
        held = ", ".join(repr(name) for name, other in FORMS.items() if other.takes_heads)
        needs = "needs heads=" if heads is None else "takes no heads="
        raise LayoutError(f"form={form!r} {needs}; {held} hold heads in one dim with others, the rest in their own")
    if form == "paged_planes" and block_tokens is None:
        raise LayoutError("form='paged_planes' needs block_tokens=: the shape (2, B, N * H * D) does not tell")
    if form == "whole_blocks" and block_tokens is not None:
        raise LayoutError("form='whole_blocks' takes no block_tokens=: its blocks have no token slots")


_Part = tuple[str, str, list[Any], dict[str, int]]  # part, dims, tensors, sizes


def parts_of(
    form: str,
    row: Form,
    caches: list[Any],
    part: str,
    head_size_v: int | None,
    heads: int | None,
    block_tokens: int | None,
) -> list[_Part]:
    """Each notation of a form, with the tensors it is of."""
    shape, itemsize = tuple(caches[0].shape), _itemsize(caches[0])
    tokens = block_tokens if row.tokens is None else int(shape[row.tokens])
    sizes = {} if heads is None else {"head": heads}
    k_part, v_part = ("k", "v") if part == "kv" else (f"k_{part}", f"v_{part}")
    if form == "cpu":
        for cache in caches:
            _check_dense(form, cache)
        parts: list[_Part] = [(part, row.dims[0], caches, {"token.1": 2})]
    elif len(row.dims) == 2:
        keys, values = ([_page(cache, row, kv) for cache in caches] for kv in (0, 1))
        assert tokens is not None
        x = 16 // itemsize
        if form == "shuffled" and tokens % x:
            raise LayoutError(
                f"form='shuffled' has blocks of {tokens} token slots; they come in groups of {x}, 16 bytes"
            )
        v_sizes = {"token.0": tokens // x, "token.1": x} if form == "shuffled" else {"token": tokens}
        parts = [
            (k_part, row.dims[0], keys, sizes | {"token": tokens, "dim.1": x}),
            (v_part, row.dims[1], values, sizes | v_sizes),
        ]
    elif head_size_v is not None:
        content = int(shape[-1])
        if head_size_v >= content or head_size_v == 0:
            raise LayoutError(f"head_size_v is {head_size_v}; a row of {content} elements holds K and V")
        dims = row.dims[0].replace("(kv dim)", "dim")
        edge = content - head_size_v
        parts = [
            (k_part, dims, [cache[..., :edge] for cache in caches], sizes),
            (v_part, dims, [cache[..., edge:] for cache in caches], sizes),
        ]
    else:
        parts = [(part, row.dims[0], caches, sizes)]
    if row.tokens is None or block_tokens is None or tokens is None or block_tokens == tokens:
        return parts
    if block_tokens % tokens:
        raise LayoutError(f"block_tokens is {block_tokens}; the tensor's blocks have {tokens} token slots, and the "
                          "manager's are a multiple of that")  # fmt: skip
    return [_manager_blocks(one, block_tokens // tokens) for one in parts]


def _manager_blocks(part: _Part, ratio: int) -> _Part:
    """The same tensors in the manager's blocks: ``ratio`` of the kernel's follow one another in each."""
    name, dims, tensors, sizes = part
    dims = _one_deeper(dims).replace("block", "(block token.0)", 1)
    return name, dims, tensors, {_one_deeper(axis): size for axis, size in sizes.items()} | {"token.0": ratio}


def _one_deeper(text: str) -> str:
    """Every token factor with its number raised by one; the whole of token is factor 0.

    >>> _one_deeper("block head (kv token.0) (token.1 dim)"), _one_deeper("token")
    ('block head (kv token.1) (token.2 dim)', 'token.1')
    """
    return re.sub(r"token(?:\.(\d))?", lambda match: f"token.{int(match[1] or 0) + 1}", text)


def _page(cache: Any, row: Form, kv: int) -> Any:
    """K or V of every block, as ``(blocks, elements of a page)``."""
    side = cache[kv] if row.pair == 0 else cache[:, kv]
    if len(side.shape) == 2:
        return side
    _check_dense("x-packed", side)
    return side.reshape(int(side.shape[0]), -1)  # dense, so a view


def _check_dense(form: str, cache: Any) -> None:
    """The rows of the last two dims follow one another without a gap."""
    (tokens, content), unit = map(int, cache.shape[-2:]), _itemsize(cache)
    steps = steps_of(cache)[-2:]
    if (tokens > 1 and steps[0] != content * unit) or (content > 1 and steps[1] != unit):
        raise LayoutError(f"the last two dims, {(tokens, content)}, have strides {steps} (bytes); {form} caches are "
                          f"dense there, {(content * unit, unit)}, as in LBHNC")  # fmt: skip


def steps_of(cache: Any) -> tuple[int, ...]:
    """Strides in bytes."""
    if callable(getattr(cache, "stride", None)):
        return tuple(int(step) * _itemsize(cache) for step in cache.stride())
    return tuple(map(int, cache.strides))


def _itemsize(cache: Any) -> int:
    return int(cache.element_size() if hasattr(cache, "element_size") else cache.itemsize)

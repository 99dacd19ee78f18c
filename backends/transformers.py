"""transformers: the paged cache of continuous batching.

Source: transformers 5.23.0, ``generation/continuous_batching/cache.py`` (``PagedAttentionCache``) and
``cache_allocators/`` (``FullAttentionCacheAllocator.register_cache_tensor``).

The whole cache is one flat tensor of bytes, shared by one allocator for each attention type. Block ``b`` of an
allocator begins at byte ``b * bytes_per_block`` of that tensor. A block holds one page for each layer of the allocator.
A page holds first the keys of all tokens, then the values::

    [ layer 0: K of all tokens | V of all tokens ][ layer 3: K | V ] ...        one block
"""

from __future__ import annotations

from typing import Any

from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

NOTATION = "block layer kv token head dim"
_MEMBERS = "layer_indices tokens_per_page num_key_value_heads head_dim cache_dtype bytes_per_page bytes_per_block"


def describe(cache: Any, *, group: str | None = None, head_start: int = 0) -> KVLayout:
    """Describe the blocks of one attention type of a ``PagedAttentionCache``.

    Block ids are those of ``allocator.block_table[request_id]``. The engine never allocates the blocks of the two
    leading trash sectors, which padding reads and writes: the first id in use is ``2 * blocks_per_sector``. The groups
    of a hybrid model divide the same bytes into blocks of different sizes, so the layouts of two groups overlap. The
    blocks in use at one time do not. A sliding window's blocks are a ring: position ``p`` lies in slot
    ``p % sliding_window`` of the request's blocks.

    Args:
        cache: ``manager.batch_processor.cache``.
        group: attention type, ``"full_attention"`` or ``"sliding_attention"``; may be left out if there is one.
        head_start: global number of this rank's first KV head. If tensor parallelism divides the heads, that is
            the rank times ``num_key_value_heads`` of the allocator; otherwise 0.

    Returns:
        ``(block, layer, 2, token, head, dim)`` in elements of the cache's type: every block of the tensor, trash
        included; ``token`` slots per page; layers with their numbers in the model.

    Raises:
        LayoutError: no paged cache, an unknown group, several groups without ``group``, or pages other than K and V.

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> full = SimpleNamespace(layer_indices=[1, 4], tokens_per_page=16, num_key_value_heads=2, head_dim=32,
    ...                        cache_dtype=np.dtype(np.float16), bytes_per_page=4096, bytes_per_block=8192)
    >>> cache = SimpleNamespace(cache_tensor=np.zeros(10 * 8192, np.uint8), cache_allocators={"full_attention": full})
    >>> layout = describe(cache)
    >>> print(layout)
    block layer kv token head dim | layer=2 kv=2 block=10 token=16 head=2 dim=32 | float16 on cpu | layers 1 4
    >>> layout.address(layer=4, part="v", block=3) - layout.address(layer=1, part="k", block=0)  # 3*8192 + 4096 + 2048
    30720
    """
    tensor, allocators = (_member(cache, "cache", name) for name in ("cache_tensor", "cache_allocators"))
    name = _group(allocators, group)
    allocator = allocators[name]
    layers, tokens, heads, dim, dtype, page_nbytes, block_nbytes = (
        _member(allocator, f"cache_allocators[{name!r}]", member) for member in _MEMBERS.split()
    )
    elements = tensor.view(dtype)
    expected = 2 * tokens * heads * dim * elements.itemsize
    if page_nbytes != expected or block_nbytes != expected * len(layers):
        raise LayoutError(
            f"group {name!r} has pages of {page_nbytes} bytes and blocks of {block_nbytes}; pages of K and V, 2 x "
            f"{tokens} tokens x {heads} heads x {dim} elements of {elements.itemsize} bytes, are {expected}, and "
            f"blocks of {len(layers)} layers {expected * len(layers)}"
        )
    total = int(tensor.shape[0]) * int(tensor.itemsize)
    if total % block_nbytes:
        raise LayoutError(f"cache_tensor has {total} bytes, no multiple of the {block_nbytes} of a {name!r} block")
    shape = (total // block_nbytes, len(layers), 2, tokens, heads, dim)
    return KVLayout.from_tensors(NOTATION, elements.reshape(shape), layers=tuple(layers), head_start=head_start)


def _group(allocators: Any, group: str | None) -> str:
    names = list(allocators)
    chosen = names[0] if group is None and len(names) == 1 else group
    if chosen not in names:
        held = f"{len(names)} groups, {', '.join(map(repr, names))}"
        raise LayoutError(f"no group {group!r}: the cache has {held}; name one with group=")
    return str(chosen)


def _member(value: Any, what: str, name: str) -> Any:
    if not hasattr(value, name):
        raise LayoutError(
            f"{what} ({type(value).__name__}) has no {name!r}; give the PagedAttentionCache of transformers 5.23, as "
            "in manager.batch_processor.cache"
        )
    return getattr(value, name)

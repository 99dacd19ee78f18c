"""State: the states of Mamba, gated delta nets and short convolutions, as opaque bytes; a block is one state slot.

Source: vLLM 0.33.0, ``model_executor/layers/mamba/abstract.py`` (``bind_kv_cache``: a page per layer and slot holds the
layer's states one after the other, and may be padded), ``mamba/mamba_utils.py`` for their shapes and
``v1/kv_cache_interface.py`` (``MambaSpec.page_size_padded``); SGLang 0.5.23, ``mem_cache/memory_pool.py``
(``MambaPool``: ``(layers, slots, ...)``, one tensor per kind of state).

==================  ================================================  ======================================
model               states of a layer                                 shape of one slot (vLLM's default order)
==================  ================================================  ======================================
Mamba-1             ``"conv"``, ``"ssm"``                             ``(width - 1, d)``, ``(d, n)``
Mamba-2             ``"conv"``, ``"ssm"``                             ``(width - 1, d)``, ``(heads, p, n)``
gated delta net     ``"conv"``, ``"ssm"``                             ``(width - 1, d)``, ``(heads, dv, dk)``
short convolution   ``"conv"``                                        ``(width - 1, d)``
linear attention    ``"ssm"``                                         ``(heads, d, d)``
==================  ================================================  ======================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplan.backends._tensors import content_dims, dense_inside, steps_of
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout


def describe(
    states: Any,
    *,
    parts: Sequence[str] | None = None,
    layer_start: int = 0,
    layers: Sequence[int] | None = None,
    seams: Sequence[int] = (),
) -> KVLayout:
    """Describe the states of recurrent layers. Dim 0 of every tensor counts slots, and the other dims are opaque.

    A state has no token slots: ``block_tokens`` is 1, and a slot moves whole. Slots may be any distance apart (padded
    pages, views into pages that hold several states); bytes between them are not moved. Only the bytes of slots have to
    match, so a state in bfloat16 can move to a pool of bytes and back.

    Args:
        states: a list or tuple with one entry per layer, in order of layers: a tensor ``(slots, ...)`` of any rank, or
            a list or tuple with one such tensor per part, as vLLM's ``layer.kv_cache``. A single tensor is one layer.
            SGLang's pool is ``list(zip(state.conv[0], state.temporal))``.
        parts: names of a layer's tensors, in order; by default ``"state"`` for one, ``"conv"``, ``"ssm"`` for two.
        layer_start: global number of the first layer.
        layers: global number of every layer, if they are not consecutive.
        seams: addresses that no descriptor may cross.

    Raises:
        LayoutError: names that do not fit the tensors, layers that differ in shape, a tensor whose slots are not
            contiguous inside, or slot counts that differ between parts.

    >>> import numpy as np
    >>> layer = np.zeros((8, 3, 512), np.float16), np.zeros((8, 16, 64, 32), np.float32)
    >>> layout = describe([layer], layer_start=4)
    >>> layout.parts, layout.num_blocks, layout.block_tokens, layout.block_nbytes
    (('conv', 'ssm'), 8, 1, 134144)
    >>> pages = np.zeros((8, 4096), np.uint8)
    >>> print(describe([pages[:, :4000]]))
    layer: block dim | layer=1 block=8 dim=4000 | uint8 on cpu | parts state
    """
    entries = [states] if hasattr(states, "shape") else states
    if not isinstance(entries, list | tuple) or not entries:
        given = "empty" if isinstance(entries, list | tuple) else f"a {type(entries).__name__}"
        raise LayoutError(f"states is {given}; give a list with one entry a layer, each a tensor or a tuple of tensors")
    rows = [_tensors(entry, layer) for layer, entry in enumerate(entries)]
    names = _names(parts, len(rows[0]))
    for layer, row in enumerate(rows):
        if len(row) != len(names):
            raise LayoutError(f"states[{layer}] holds {len(row)} tensors, and the parts are {names}; describe layers "
                              "of another kind by themselves and merge")  # fmt: skip
        for name, tensor in zip(names, row, strict=True):
            if not tuple(tensor.shape) or not dense_inside(tensor):
                raise LayoutError(
                    f"{name!r} of states[{layer}] has shape {tuple(tensor.shape)} and strides {steps_of(tensor)} "
                    "(bytes); a state tensor is (slots, ...), and a slot is contiguous: its bytes in another order are "
                    "another state, so pass the tensor as it was allocated"
                )
    return KVLayout.merge([
        KVLayout.from_tensors(
            f"layer: block {content_dims(len(column[0].shape) - 1)}", column,
            layer_start=layer_start, layers=layers, part=name, seams=seams,
        )
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    ])  # fmt: skip


def _tensors(entry: Any, layer: int) -> tuple[Any, ...]:
    """Return the tensors of one layer."""
    tensors = (entry,) if hasattr(entry, "shape") else entry
    if not isinstance(tensors, list | tuple) or not tensors or not all(hasattr(t, "shape") for t in tensors):
        raise LayoutError(f"states[{layer}] is a {type(entry).__name__} that is neither a tensor (slots, ...) nor a "
                          "list or tuple of them, one a part")  # fmt: skip
    return tuple(tensors)


def _names(parts: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if parts is None:
        if count > 2:
            raise LayoutError(f"{count} tensors a layer: name them, as parts=('conv', 'ssm', ...)")
        return ("state",) if count == 1 else ("conv", "ssm")
    if isinstance(parts, str) or len(parts) != count or len(set(parts)) != count:
        raise LayoutError(f"parts is {parts!r}, and a layer holds {count} tensors: give a tuple with a name of each")
    return tuple(parts)

"""Token slots of SGLang's pages, and the content of its pools."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine's pools are torch's")


PAGE, LAYERS = 4, 3


def slots(pages, page=PAGE):
    """The token slots of pages, as the engine lists them."""
    return torch.tensor([page * number + k for number in pages for k in range(page)], dtype=torch.int64)


def fill(pool, seed):
    """Noise in every buffer of a pool."""
    made = torch.Generator().manual_seed(seed)
    for name in ("k_buffer", "v_buffer", "kv_buffer", "index_k_with_scale_buffer"):
        held = getattr(pool, name, None)
        for buffer in [] if held is None else held if isinstance(held, list) else [held]:
            raw = buffer.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=made))
    return pool


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))

"""quantized.with_scales: tensors beside a cache become parts of it."""

import numpy as np
import pytest
import torch

import kvplan
from kvplan import IncompatibleLayoutsError, LayoutError
from kvplan.backends import flashinfer, quantized
from tests.backends.moves import move
from tests.backends.rows import hold_every_row


def test_four_tensors_of_nvfp4():
    """FlashInfer at D = 128: K and V of 64 bytes, their scales of 8, for 8 heads x 16 tokens."""
    data = [tuple(torch.zeros(4, 16, 8, 64, dtype=torch.uint8) for _ in "kv") for _ in range(2)]
    scales = {part: [torch.zeros(4, 16, 8, 8, dtype=torch.uint8) for _ in range(2)] for part in ("k_scale", "v_scale")}
    cache = flashinfer.describe(data, layers=[2, 5], head_start=8)
    layout = quantized.with_scales(cache, scales)
    assert (layout.layers, layout.heads, layout.block_tokens) == ((2, 5), range(8, 16), 16)
    assert layout.block_nbytes == 2 * 18_432

    def row(layer, part, block, token, head):
        return (*data[layer], *(scale[layer] for scale in scales.values()))[part][block, token, head]

    assert hold_every_row(layout, row) == 2 * 4 * 4 * 16 * 8
    hnd = [tuple(half.transpose(1, 2) for half in pair) for pair in data]
    turned = {part: [scale.transpose(1, 2) for scale in column] for part, column in scales.items()}
    cache = flashinfer.describe(hnd, kv_layout="HND", layers=[2, 5], head_start=8)
    assert quantized.with_scales(cache, turned, kv_layout="HND") == layout


def test_swizzled_scales_are_whole_blocks():
    cache = flashinfer.describe(torch.zeros(4, 2, 16, 8, 64, dtype=torch.uint8))
    swizzled = torch.zeros(4, 8, 16, 8, dtype=torch.uint8)
    layout = quantized.with_scales(cache, {"k_scale": swizzled, "v_scale": swizzled.clone()}, whole_blocks=True)
    assert layout.block_nbytes == 18_432
    assert layout.component(0, "k_scale").form.opaque
    assert not layout.component(0, "k").form.opaque
    flat = quantized.with_scales(cache, {"k_scale": swizzled.view(4, -1)}, whole_blocks=True)
    assert quantized.with_scales(cache, {"k_scale": swizzled.view(4, 128, 8)}, whole_blocks=True) == flat
    assert flat.slice(parts=["k_scale"]) == layout.slice(parts=["k_scale"])
    kernel = quantized.with_scales(cache, {"k_scale": swizzled.view(16, 256)}, whole_blocks=True)  # blocks of 4 tokens
    assert kernel.address(layer=0, part="k_scale", block=3, token=2) == swizzled.data_ptr() + 3 * 1024 + 2 * 256
    other = flashinfer.describe(torch.zeros(2, 2, 32, 8, 64, dtype=torch.uint8))
    other = quantized.with_scales(other, {"k_scale": torch.zeros(2, 2048, dtype=torch.uint8)}, whole_blocks=True)
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(flat, other)


def test_a_scale_a_token_and_head():
    """float32, one a (token, head), and one a token; halves of a block go to a larger one."""
    shape, halves = (4, 4, 2), []
    for tokens in (4, 8):
        kv = flashinfer.describe(np.zeros((4, 2, tokens, 2, 8), np.int8))
        k = np.arange(4 * tokens * 2, dtype=np.float32).reshape(4, tokens, 2) * (tokens == shape[1])
        halves.append((quantized.with_scales(kv, {"k_scale": k, "scale": k[..., 0].copy()}), k))
    (src, k), (dst, arrived) = halves
    assert src.block_nbytes == 2 * 4 * 2 * 8 + 4 * 2 * 4 + 4 * 4
    assert src.address(layer=0, part="k_scale", block=1, token=2, head=1) == k.ctypes.data + (8 + 4 + 1) * 4
    move(src, dst, [3, 1], [2])
    assert (arrived[2] == np.concatenate([k[3], k[1]])).all()


SCALES = np.zeros((4, 16, 2), np.float32)
SCALE_CASES = {
    "order": ({"k_scale": SCALES}, {"kv_layout": "N"}, "kv_layout is 'N'; it is one of 'NHD', 'HND'"),
    "rank": ({"k_scale": SCALES[0, 0]}, {}, r"scales\['k_scale'\] has shape \(2,\); it is \(blocks, tokens\), or "),
    "no tensors": ({"k_scale": []}, {}, r"give scales\['k_scale'\] as a list with one tensor a layer"),
    "tokens": ({"k_scale": SCALES[:, :8].copy()}, {}, r"block_tokens differ: \[8, 16\]"),
    "blocks": ({"k_scale": SCALES[:2]}, {}, "layout 1 has 2 blocks, layout 0 has 4"),
    "a part it has": ({"k": SCALES}, {}, "layouts 0 and 1 both hold layer 3 'k'"),
    "layers": ({"k_scale": [SCALES, SCALES.copy()]}, {}, r"layers are \(3,\); the tensors hold 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALE_CASES)
def test_refusals_of_scales(case):
    scales, options, message = SCALE_CASES[case]
    cache = flashinfer.describe(np.zeros((4, 2, 16, 2, 64), np.uint8), layer_start=3)
    with pytest.raises(LayoutError, match=message):
        quantized.with_scales(cache, scales, **options)

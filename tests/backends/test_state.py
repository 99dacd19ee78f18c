"""state: slots of recurrent layers, opaque and padded, alone or several kinds to a page."""

import numpy as np
import pytest
import torch

import kvplan
from kvplan import IncompatibleLayoutsError, LayoutError
from kvplan.backends import state
from tests.backends.moves import move, noise
from tests.backends.rows import address_of

# A small Mamba-2: (width - 1, d) of bfloat16 and (heads, p, n) of float32 in a page of vLLM 0.33, 768 bytes of pad.
CONV, SSM, PAGE = 3 * 512 * 2, 4 * 16 * 32 * 4, 12_032


def pages_and_states(blocks, seed=0):
    pages = torch.from_numpy(noise((blocks, PAGE), seed))
    conv = pages[:, :CONV].view(torch.bfloat16).view(-1, 3, 512)
    ssm = pages[:, CONV : CONV + SSM].view(torch.float32).view(-1, 4, 16, 32)
    return pages, (conv, ssm)


def test_states_of_one_page():
    pages, states = zip(*(pages_and_states(5, seed) for seed in range(2)), strict=True)
    layout = state.describe(list(states), layers=[1, 7])
    assert (layout.layers, layout.parts) == ((1, 7), ("conv", "ssm"))
    assert (layout.num_blocks, layout.block_tokens, layout.opaque) == (5, 1, True)
    assert layout.block_nbytes == 2 * (3_072 + 8_192)  # bytes; the 768 of pad are none of it
    for k, layer in enumerate((1, 7)):
        for block in range(5):
            base = pages[k].data_ptr() + block * 12_032
            assert layout.address(layer=layer, part="conv", block=block) == base == address_of(states[k][0][block])
            assert layout.address(layer=layer, part="ssm", block=block) == base + 3_072
            assert address_of(states[k][1][block]) == base + 3_072


def test_bytes_move_and_pads_stay():
    src_pages, src_states = pages_and_states(5)
    dst_pages, dst_states = pages_and_states(4, seed=1)
    before = dst_pages.clone()
    program = move(state.describe([src_states]), state.describe([dst_states]), [4, 0], [1, 3])
    # The two states of a page lie side by side on both sides: one run.
    assert (program.runs, program.run_nbytes, program.unit_nbytes) == (1, (11_264, 11_264), 11_264)
    expected = before.clone()
    expected[[1, 3], :11_264] = src_pages[[4, 0], :11_264]
    assert torch.equal(dst_pages, expected)
    assert not torch.equal(dst_pages, before)


def test_to_a_pool_of_bytes_and_back():
    pages, states = pages_and_states(5)
    pool = noise((6, 3_072), 2), noise((6, 8_192), 3)
    host = state.describe([pool])
    program = move(state.describe([states]), host, [2, 3], [5, 0])
    assert (program.runs, program.run_nbytes) == (2, (3_072, 8_192))
    assert (pool[0][[5, 0]] == pages[[2, 3], :3_072].numpy()).all()
    assert (pool[1][[5, 0]] == pages[[2, 3], 3_072:11_264].numpy()).all()
    other_pages, other = pages_and_states(3, seed=4)
    move(host, state.describe([other]), [5], [1])
    assert torch.equal(other_pages[1, :11_264], pages[2, :11_264])


def test_one_tensor_a_layer():
    """A padded page of raw bytes, as the logical (B, 1, 1, C) of vLLM 0.33 or as (B, C)."""
    pages = noise((4, 1, 1, 640))
    layout = state.describe([pages[..., :600]])
    assert (layout.notation, layout.parts, layout.block_nbytes) == ("layer: block dim.0 dim.1 dim.2", ("state",), 600)
    assert layout == state.describe(pages[:, 0, 0, :600])
    assert layout.address(layer=0, part="state", block=3) == pages.ctypes.data + 3 * 640
    assert state.describe(pages, parts=["conv"], layer_start=3).layers == (3,)
    assert state.describe(pages, parts=["conv"]).parts == ("conv",)


def test_a_pool_of_all_layers():
    """SGLang: (layers, slots, ...) for each kind of state; a layer's view is not at the start of its storage."""
    conv, temporal = torch.zeros(3, 9, 256, 3, dtype=torch.bfloat16), torch.zeros(3, 9, 2, 64, 64)
    layout = state.describe(list(zip(conv, temporal, strict=True)))
    assert (layout.layers, layout.num_blocks) == ((0, 1, 2), 9)
    assert layout.block_nbytes == 3 * (1_536 + 32_768)
    for layer in range(3):
        for block in range(9):
            assert layout.address(layer=layer, part="conv", block=block) == conv[layer, block].data_ptr()
            assert layout.address(layer=layer, part="ssm", block=block) == temporal[layer, block].data_ptr()


def test_more_kinds_of_state():
    """Kimi's delta attention keeps a convolution each for q, k and v."""
    layer = [*(np.zeros((4, 3, dim), np.float16) for dim in (8, 16, 32)), np.zeros((4, 2, 8, 8), np.float32)]
    layout = state.describe([layer], parts=("conv_q", "conv_k", "conv_v", "ssm"))
    assert layout.parts == ("conv_q", "conv_k", "conv_v", "ssm")
    assert layout.block_nbytes == 48 + 96 + 192 + 512


def test_dims_of_one_have_any_stride():
    storage = torch.zeros(4, 48, dtype=torch.uint8)
    odd = storage.as_strided((4, 1, 24, 1), (48, 7, 1, 5))
    assert state.describe(odd) == state.describe(storage[:, :24])
    assert state.describe(odd).block_nbytes == 24
    assert state.describe(np.zeros((4, 1), np.float32)).block_nbytes == 4


def test_whole_slots_or_none():
    layout = state.describe(np.zeros((4, 640), np.uint8))
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(layout, state.describe(np.zeros((8, 320), np.uint8)))
    tokens = kvplan.KVLayout.from_tensors("block token dim", np.zeros((4, 16, 40), np.uint8), part="state")
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(layout, tokens)
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(tokens, layout)
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(layout, state.describe(np.zeros((4, 640), np.uint8), parts=["conv"]))


def test_beside_attention():
    """A hybrid model's blocks: tokens in one layer, a state in the other."""
    kv = kvplan.KVLayout.from_tensors("layer: block token dim", [np.zeros((4, 16, 64), np.int8)])
    both = kvplan.KVLayout.merge([kv, state.describe(np.zeros((4, 640), np.uint8), layer_start=1)])
    assert (both.layers, both.block_tokens, both.block_nbytes) == ((0, 1), 16, 1_024 + 640)


def test_seams():
    pages = np.zeros((4, 64), np.int8)
    seam = pages[2].ctypes.data
    assert state.describe(pages, seams=[seam]).seams == (seam,)


ONE = np.zeros((4, 3, 8), np.float16)
CASES = {
    "nothing": ([], {}, "states is empty; give a list with one entry a layer"),
    "a dict": ({"conv": ONE}, {}, "states is a dict; give a list"),
    "no tensors": ([None], {}, r"states\[0\] is a NoneType that is neither a tensor .* nor a list or tuple"),
    "no states": ([()], {}, r"states\[0\] is a tuple that is neither"),
    "a deeper list": ([[[ONE]]], {}, r"states\[0\] is a list that is neither"),
    "uneven": ([(ONE, ONE), (ONE,)], {}, r"states\[1\] holds 1 tensors, and the parts are \('conv', 'ssm'\); describe"),
    "three": ([(ONE, ONE, ONE)], {}, r"3 tensors a layer: name them, as parts=\('conv', 'ssm', ...\)"),
    "too few names": ([(ONE, ONE)], {"parts": ["conv"]}, r"parts are \('conv',\), and a layer holds 2 tensors: each"),
    "a name twice": ([(ONE, ONE.copy())], {"parts": ["a", "a"]}, r"parts are \('a', 'a'\), and a layer holds 2"),
    "a string": ([ONE], {"parts": "conv"}, r"parts is the string 'conv'; give a tuple of names, as \('conv',\)"),
    "no name": ([ONE], {"parts": ["k scale"]}, "part is 'k scale'; the name of a part is an"),
    "transposed": (ONE.swapaxes(1, 2), {}, r"'state' of states\[0\] has shape \(4, 8, 3\) and strides .*a slot is not"),
    "torch transposed": ([torch.zeros(4, 3, 8).transpose(1, 2)], {}, r"\(96, 4, 32\) \(bytes\): a slot is not cont"),
    "cut inside": ([(ONE, ONE[:, :, :4])], {}, r"'ssm' of states\[0\] has shape \(4, 3, 4\).* not transposed or"),
    "every other": ([ONE[..., ::2]], {}, "a slot is not contiguous"),
    "two apart": ([ONE[:, ::2]], {}, r"shape \(4, 2, 8\) and strides .* a slot is not contiguous"),
    "no dims": ([np.zeros(())], {}, r"'state' of states\[0\] has no dims; a state tensor is \(slots, ...\)"),
    "layers differ": ([ONE, np.zeros((4, 3, 9), np.float16)], {}, r"tensor 1 has shape \(4, 3, 9\), tensor 0 has"),
    "slots differ": ([(ONE, np.zeros((5, 8)))], {}, "layout 1 has 5 blocks, layout 0 has 4"),
    "the same bytes": ([(ONE, ONE)], {}, "layer 0 'conv' and layer 0 'ssm' overlap"),
    "layers": ([ONE], {"layers": [1, 2]}, r"layers are \(1, 2\); the tensors hold 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, options, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        state.describe(given, **options)

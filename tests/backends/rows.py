"""Every row of a small cache, held against the tensor's own indexing."""

from itertools import product


def address_of(element):
    """Where one element of a torch tensor, or one-element view of a numpy array, begins."""
    return element.data_ptr() if hasattr(element, "data_ptr") else element.__array_interface__["data"][0]


def hold_every_row(layout, row):
    """``row(layer, kv, block, token, head)`` is the tensor's row; layer and head counted from the first held."""
    count = 0
    layers, parts = list(enumerate(layout.layers)), list(enumerate(layout.parts))
    heads, blocks, tokens = list(enumerate(layout.heads)), range(layout.num_blocks), range(layout.block_tokens)
    for (k, layer), (kv, part), block, token, (h, head) in product(layers, parts, blocks, tokens, heads):
        expected = address_of(row(k, kv, block, token, h))
        assert layout.address(layer=layer, part=part, block=block, token=token, head=head) == expected
        count += 1
    return count

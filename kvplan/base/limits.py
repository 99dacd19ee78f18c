"""Bounds of what comes from files and other processes: size, depth, counts, work. ``docs/limits.md`` argues each.

Past a bound stands a :class:`kvplan.LayoutError`, so that no file of any content takes more than seconds or gigabytes.
"""

from __future__ import annotations

# ---- text ----------------------------------------------------------------------------------------------------------

JSON_NBYTES = 64 << 20  # of a dump, card, spec or config: a million blocks in a table take 16 MiB
TOML_NBYTES = 64 << 10  # of a spec written by hand, which has hundreds of bytes
TOML_DOTS = 64  # of one line: a dotted key takes time quadratic in its parts
PROFILE_NBYTES = 1 << 20  # of a device profile, which has some kilobytes
SPEC_LEVELS = 8  # of ``layouts`` inside ``layouts``; one is usual
NOTATION_LENGTH = 1 << 16  # characters, with those of merged layouts
NAME_LENGTH = 200  # characters of a part or a peer
DTYPE_LENGTH = 1000  # characters: numpy names every field of a structured type

# ---- counts --------------------------------------------------------------------------------------------------------

LAYERS = 1 << 12  # of a model's config; the deepest models have about 128
COMPONENTS = 1 << 14  # (layer, part)s of a layout: 128 layers of 128 parts each
HEADS = 1 << 16  # KV heads of a layout; models have up to 256
BLOCK_TOKENS = 1 << 21  # token slots of a block: a context of two million tokens in one block
NUMBER = 2**31 - 1  # the largest number of a layer or a head
VIEWS = 1 << 17  # (layer, part)s of a dump, each head by itself where heads are separate allocations
TENSORS = 1 << 17  # separate tensors of a spec: 256 GiB where each takes the 2 MiB of an allocator

# ---- work ----------------------------------------------------------------------------------------------------------

OVERLAP_STEPS = 1 << 21  # of the proof that no two coordinates share a byte: about two seconds
PLACES = 1 << 25  # (component, block)s that are looked up one by one where tables do not nest
PIECES = 1 << 16  # of the common refinement of two layouts, where splits of their axes do not divide each other
RUNS = 1 << 20  # rows of a program's table
COPIES = 1 << 24  # of one unit of a program: 128 layers, K and V, 256 tokens, 256 heads, each row apart
ROWS = 1 << 20  # that one question about addresses looks at
WOVEN = 1 << 20  # runs of one block that are drawn one by one
ADVISED = 1 << 17  # components that are compiled in search of a better order, over all orders tried

"""The copy kernel's own text under Triton's interpreter, byte for byte; and the instructions it is compiled to."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.execute.gpu.shape import WORDS, Shape, shape_of
from tests import simulated
from tests.patience import PATIENCE
from tests.profiles import examples

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

GUARD = 64


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """Nothing that Triton kept before is used, and nothing is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


class Copies:
    """A header, and the memory that it copies between: units at ``pitch``, items at offsets within them."""

    def __init__(self, units: int, sizes: list[int], word: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        gap = 3 * word  # between items, so that no two are one
        self.sizes = np.array(sizes, np.int64)
        starts = np.cumsum(self.sizes + gap) - self.sizes - gap
        self.pitch = int((self.sizes + gap).sum()) + word
        nbytes = 2 * GUARD + 16 + max(units, 1) * self.pitch
        self.src, self.dst = rng.integers(0, 256, nbytes, np.uint8), np.full(nbytes, 0xA5, np.uint8)
        self.begin = [GUARD + -(root.ctypes.data + GUARD) % 16 + (word if word < 16 else 0)
                      for root in (self.src, self.dst)]  # fmt: skip
        order = rng.permutation(units)
        self.src_offsets, self.dst_offsets = order * self.pitch, np.arange(units) * self.pitch
        self.src_items, self.dst_items = starts, starts[::-1].copy() if len(set(sizes)) == 1 else starts
        self.arrays = [
            self.src.ctypes.data + self.begin[0] + self.src_offsets,
            self.dst.ctypes.data + self.begin[1] + self.dst_offsets,
            self.src_items,
            self.dst_items,
            self.sizes,
        ]
        self.arrays = [np.ascontiguousarray(array, np.int64) for array in self.arrays]

    def header(self, width: int) -> list[int]:
        chunks = -(-int(self.sizes.max()) // width)
        return [self.src_offsets.size, self.sizes.size, chunks, *(array.ctypes.data for array in self.arrays)]

    def expected(self) -> np.ndarray:
        made = np.full(self.dst.size, 0xA5, np.uint8)
        for src, dst in zip(self.src_offsets, self.dst_offsets, strict=True):
            for src_item, dst_item, size in zip(self.src_items, self.dst_items, self.sizes, strict=True):
                at, to = self.begin[0] + src + src_item, self.begin[1] + dst + dst_item
                made[to : to + size] = self.src[at : at + size]
        return made


def headers_of(several: Sequence[Copies], width: int) -> torch.Tensor:
    """The headers of one launch, one behind another; the first says how many there are."""
    rows = [[*copies.header(width), len(several) if k == 0 else -1] for k, copies in enumerate(several)]
    return torch.tensor(rows, dtype=torch.int64).ravel()


def check(several: Copies | Sequence[Copies], shape: Shape, programs: int) -> None:
    from kvplan.execute.gpu.kernel import interpret

    several = [several] if isinstance(several, Copies) else several
    before, want = [one.src.copy() for one in several], [one.expected() for one in several]
    header = headers_of(several, shape.width)
    interpret(header, shape, programs)
    for copies, src, dst in zip(several, before, want, strict=True):
        np.testing.assert_array_equal(copies.dst, dst)
        np.testing.assert_array_equal(copies.src, src)
        copies.dst[:] = 0xA5
    simulated.kernel(header.data_ptr(), shape, random.Random(0))  # the stand-in of the simulated GPU
    for copies, dst in zip(several, want, strict=True):
        np.testing.assert_array_equal(copies.dst, dst)


@pytest.mark.parametrize(
    ("word", "size"),
    [(8, 8), (4, 132), (8, 584), (16, 656), (8, 4088), (16, 4096), (8, 8200), (2, 130), (1, 131), (2, 2050), (1, 1033)],
)
@pytest.mark.parametrize("programs", [1, 3])
def test_sizes_that_fill_no_row_leave_guards_alone(word, size, programs):
    check(Copies(5, [size, size], word), small(word, size), programs)


@pytest.mark.parametrize("whole", [1, 2, 4, 8])
@pytest.mark.parametrize("word", [16, 4])
def test_rows_of_one_and_of_several_accesses_and_of_several_chunks(word, whole):
    """``whole``: accesses of a warp in a row; items that end before it, at it and after it."""
    access = 32 * word
    shape = shape_of(word, whole * access, max(8, whole) * access, 1)
    assert shape.width == whole * access
    sizes = [word, access, shape.width - word, shape.width, shape.width + word, 3 * shape.width - access // 2]
    check(Copies(2, [size for size in sizes if size > 0], word), shape, 2)


@pytest.mark.parametrize(("units", "sizes"), [(0, [64]), (1, [64]), (7, [64]), (40, [64, 48, 16]), (9, [64] * 7)])
@pytest.mark.parametrize("programs", [1, 2, 8])
def test_more_tiles_than_programs_fewer_and_a_ragged_last_one(units, sizes, programs):
    shape = shape_of(16, 64, 1024, 1)
    assert shape.rows == 16
    check(Copies(units, sizes, 16), shape, programs)


def small(word: int, size: int) -> Shape:
    """A variant of one warp and few rows."""
    return shape_of(word, size, 2048, 1)


@st.composite
def headers(draw):
    word = draw(st.sampled_from(WORDS))
    shape = shape_of(
        word, draw(st.integers(1, 80)) * word, draw(st.sampled_from((1024, 2048))), draw(st.sampled_from((1, 2)))
    )
    most = min(3 * shape.width // word, 100)
    sizes = draw(st.lists(st.integers(1, most).map(lambda count: count * word), min_size=1, max_size=5))
    return Copies(draw(st.integers(0, 9)), sizes, word, draw(st.integers(0, 99))), shape, draw(st.integers(1, 4))


@examples(40)
@given(
    units=st.lists(st.integers(0, 9), min_size=2, max_size=5),
    sizes=st.lists(st.sampled_from((16, 48, 64, 80, 160)), min_size=1, max_size=3),
    programs=st.integers(1, 5),
    rows=st.sampled_from((512, 1024)),
    seed=st.integers(0, 99),
)
def test_several_headers_are_carried_out_by_one_launch(units, sizes, programs, rows, seed):
    shape = shape_of(16, 64, rows, 1)
    check([Copies(count, sizes, 16, seed + k) for k, count in enumerate(units)], shape, programs)


@examples(40)
@given(drawn=headers())
def test_any_header_is_carried_out(drawn):
    check(*drawn)


# Compiled.

TILES = {"load": 128 << 10, "store": 32 << 10, "least": 1 << 10}  # bytes; see kvplan.execute.gpu.kernel_path and Policy


def variant(word: int, tile: int = TILES["load"]) -> Shape:
    """What long rows of a word are copied by."""
    return shape_of(word, 1 << 20, tile)


def widths(ptx: str, instruction: str) -> set[int]:
    """Bytes that the global loads or stores of a text move, a lane and instruction."""
    made = set()
    for modifiers in re.findall(rf"\b{instruction}\.global((?:[.:]+\w+)+)", ptx):
        parts = re.split(r"[.:]+", modifiers.strip(".:"))
        element = re.fullmatch(r"[bsuf](\d+)", parts[-1])
        assert element, f"{instruction}.global{modifiers}"
        vector = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        made.add(vector * int(element.group(1)) // 8)
    return made


def test_widths_are_read_from_any_spelling():
    ptx = """
        ld.global.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ];
        @%p1 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 ];
        ld.global.L1::no_allocate.L2::cache_hint.b16 %rs1, [ %rd1 ], %rd2;
        st.global.b8 [ %rd1 ], %rs1;
    """
    assert widths(ptx, "ld") == {16, 2}
    assert widths(ptx, "st") == {1}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("word", WORDS)
def test_words_travel_whole(word, arch):
    from kvplan.execute.gpu.kernel import compile_kernel

    ptx = compile_kernel(variant(word), arch).ptx
    assert f".target sm_{arch}" in ptx
    assert widths(ptx, "st") == {word}
    # Beside the words, loads of the header's and the tables' integers: one or two of 8 bytes.
    loads = widths(ptx, "ld")
    assert word in loads
    assert loads <= {word, 8, 16}
    assert not re.search(r"\b(ld|st)\.local", ptx)


@pytest.mark.parametrize("longest", [512, 2048, 1 << 20])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_widest_variants_spill_nothing_that_is_copied(arch, tile, longest, tmp_path):
    from kvplan.execute.gpu.kernel import compile_kernel

    tool = cuobjdump()
    if tool is None:
        pytest.skip("this Triton comes without cuobjdump")
    image, shape = tmp_path / "kernel.cubin", shape_of(16, longest, tile)
    image.write_bytes(compile_kernel(shape, arch).image)
    said = subprocess.run(
        [tool, "-res-usage", image], capture_output=True, text=True, check=True, timeout=PATIENCE
    ).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said))
    assert int(found["REG"]) * 32 * shape.warps <= 64 << 10, "a multiprocessor has so many registers"
    # Three numbers that are needed but once a tile may wait in local memory; what is copied may not.
    assert int(found["STACK"]) <= 24
    assert found["LOCAL"] == "0"


@pytest.mark.parametrize("route", ["device", "push", "pull"])
@pytest.mark.parametrize("longest", [512, 2048, 1 << 20])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_narrow_programs_share_a_multiprocessor(arch, longest, route, tmp_path):
    """Beside compute, six programs of four warps run on one multiprocessor (see BESIDE_KERNELS)."""
    from kvplan.cost.policy import BESIDE_KERNELS
    from kvplan.execute.gpu.kernel import compile_kernel

    size = BESIDE_KERNELS[route]
    shape = shape_of(16, longest, size.tile, size.warps)
    assert shape.warps == 4
    made = compile_kernel(shape, arch)
    assert widths(made.ptx, "st") == {16}
    tool = cuobjdump()
    if tool is None:
        pytest.skip("this Triton comes without cuobjdump")
    image = tmp_path / "kernel.cubin"
    image.write_bytes(made.image)
    said = subprocess.run(
        [tool, "-res-usage", image], capture_output=True, text=True, check=True, timeout=PATIENCE
    ).stdout
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", said))
    programs = 6 if longest > 512 and arch > 80 else 4  # short rows need an address for each word
    assert int(found["REG"]) * 32 * shape.warps * programs <= 64 << 10, "a multiprocessor has so many registers"
    assert found["STACK"] == "0"


def cuobjdump() -> Path | None:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return tool if tool.exists() else None


def test_a_compiled_kernel_says_what_its_launch_needs():
    from kvplan.execute.gpu.kernel import compile_kernel

    shape = variant(16)
    made = compile_kernel(shape, 90)
    assert made.image[:4] == b"\x7fELF"
    assert f".entry {made.name}(" in made.ptx
    assert made.threads == 1024
    assert made.shared == 0
    assert compile_kernel(shape, 90) is made

"""The instructions that the copy kernel is compiled to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvplan.execute.gpu.resources import WORDS, Shape, shape_of
from tests.patience import PATIENCE

pytest.importorskip("triton")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """Nothing that Triton kept before is used, and nothing is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


REGISTERS = 64 << 10  # of a multiprocessor
TILES = {"load": 128 << 10, "store": 32 << 10, "least": 1 << 10}  # bytes; see kvplan.execute.gpu.paths and Policy


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


def used(image: bytes, folder: Path) -> dict[str, int]:
    """Registers a thread, and bytes of stack and local memory."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("this Triton comes without cuobjdump")
    (folder / "kernel.cubin").write_bytes(image)
    command = [tool, "-res-usage", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}


@pytest.mark.parametrize("longest", [512, 2048, 1 << 20])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_widest_variants_spill_nothing_that_is_copied(arch, tile, longest, tmp_path):
    from kvplan.execute.gpu.kernel import compile_kernel

    shape = shape_of(16, longest, tile)
    found = used(compile_kernel(shape, arch).image, tmp_path)
    assert found["REG"] * 32 * shape.warps <= REGISTERS
    # Three numbers that are needed but once a tile may wait in local memory; what is copied may not.
    assert found["STACK"] <= 24
    assert found["LOCAL"] == 0


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
    found = used(compile_kernel(shape, arch).image, tmp_path)
    programs = 6 if longest > 512 and arch > 80 else 4  # short rows need an address for each word
    assert found["REG"] * 32 * shape.warps * programs <= REGISTERS
    assert found["STACK"] == 0


def cuobjdump() -> Path | None:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return tool if tool.exists() else None

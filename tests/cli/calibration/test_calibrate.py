"""What `kvplan calibrate` saves and answers; what measures is not run."""

from __future__ import annotations

import pytest

from kvplan import TransferError
from kvplan.cost import store
from kvplan.cost.profile import DeviceProfile, default
from kvplan.cuda import machine
from kvplan.measure import calibrate
from tests.cli.calibrated_machine import H100, MEASURED, complaint, text

GOLDEN = """\
GPU     not known, 108 SMs
driver  not known, a link not known
made    default: kvplan, measured nowhere
load    24.0 GB/s by the copy engine, 22.0 by SMs
store   24.0 GB/s by the copy engine, 22.0 by SMs
device  1850.0 GB/s by the copy engine, 1750.0 by SMs
note    a guess that was measured nowhere: run `kvplan calibrate`

                         fixed   a piece     GB/s  beside decode  beside prefill
────────────────────────────────────────────────────────────────────────────────
load, kernel             65 us      1 ns     21.7    71 us x1.08    271 us x1.08
load, copy_engine        80 us    500 ns     23.8    81 us x1.04     81 us x1.04
load, copy_engine_2d    135 us    100 ns     23.8   136 us x1.02    136 us x1.02
load, staged            140 us    500 ns     23.8   144 us x1.06    344 us x1.06
store, kernel            65 us      1 ns     21.7    71 us x1.08    271 us x1.08
store, copy_engine       80 us    500 ns     23.8    81 us x1.04     81 us x1.04
store, copy_engine_2d   135 us    100 ns     23.8   136 us x1.02    136 us x1.02
store, staged           140 us    500 ns     23.8   144 us x1.06    344 us x1.06
device, kernel           65 us      0 ns  1,754.4    71 us x1.10    271 us x1.10
device, copy_engine      75 us  3,700 ns  1,851.9    76 us x1.10     76 us x1.10
device, copy_engine_2d  135 us  1,500 ns  1,851.9   136 us x1.04    136 us x1.04
"""


@pytest.fixture
def measures(monkeypatch):
    """``measures(profile)``: the GPU is an H100, and this is what is measured; gives what was asked."""
    asked = []

    def measuring(profile: DeviceProfile = MEASURED):
        def look(ordinal=0):
            asked.append(ordinal)
            return H100

        def measured(here, device, progress=None):
            assert here == H100
            asked.append(device)
            if progress is not None:
                progress(0.0, "memory")
            if progress is not None:
                progress(1.0, "done")
            return profile

        monkeypatch.setattr(machine, "machine", look)
        monkeypatch.setattr(calibrate, "calibrate", measured)
        return asked

    return measuring


def test_it_reads_well_at_80_columns(capsys, measures):
    measures(default())
    out, _ = text(capsys)
    assert out == GOLDEN
    assert max(map(len, out.splitlines())) <= 80
    assert all(line == line.rstrip() for line in out.splitlines())


def test_what_is_measured_is_what_is_found_later(capsys, measures, folder):
    asked = measures()
    out, err = text(capsys)
    path = folder / "nvidia-h100_580.1_pcie5x16.json"
    assert asked == [0, "cuda:0"]
    assert store.find(H100) == store.read(path) == MEASURED
    assert [one.name for one in folder.iterdir()] == [path.name]
    assert f"saved {path} ({path.stat().st_size:,} bytes" in err
    assert "NVIDIA H100, 132 SMs" in out
    assert "calibrated: kvplan 0.1.0, 2026-11-21, 900 samples" in out


@pytest.mark.parametrize("argv", [(), ("--json",), ("--device", "cuda:1")])
def test_without_a_gpu_it_says_so_in_a_line(capsys, monkeypatch, folder, argv):
    def nobody(ordinal):
        raise TransferError("the CUDA driver (libcuda.so.1) is not there")

    monkeypatch.setattr(machine, "machine", nobody)
    assert complaint(capsys, *argv) == "kvplan: the CUDA driver (libcuda.so.1) is not there\n"
    assert not list(folder.glob("*"))

"""What `kvplan calibrate` saves and answers; what measures is not run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvplan.cli import main
from kvplan.cost import store
from kvplan.cost.profile import default
from kvplan.cuda import machine
from kvplan.measure import calibrate
from tests.commands import hold_screen

H100 = machine.Machine("NVIDIA H100", "580.1", machine.Link(1, 16, 5, 16), 13000, "0000:0f:00.0", 0)
MEASURED = replace(
    default(), gpu="NVIDIA H100", driver="580.1", generation=5, width=16, how="calibrated", multiprocessors=132,
    made="kvplan 0.1.0, 2026-11-21, 900 samples", note="",
)  # fmt: skip


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """An H100 with this profile; profiles are kept in the folder that is returned, and kvplan ships none."""
    for variable, value in {"XDG_CACHE_HOME": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "80"}.items():
        monkeypatch.setenv(variable, value)
    for variable in ("KVPLAN_PROFILE", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(store, "PROFILES", tmp_path / "shipped")
    monkeypatch.setattr(machine, "machine", lambda ordinal=0: H100)
    monkeypatch.setattr(calibrate, "calibrate", lambda here, device, progress=None: MEASURED)
    return tmp_path / "kvplan" / "profiles"


def test_it_reads_well_at_80_columns_and_is_found_later(capsys, measured):
    assert main(["calibrate"]) == 0
    out, err = capsys.readouterr()
    hold_screen("calibrate", out)
    (path,) = measured.iterdir()
    assert path.name == "nvidia-h100_580.1_pcie5x16.json"
    assert store.find(H100) == store.read(path) == MEASURED
    assert f"saved {path} ({path.stat().st_size:,} bytes" in err
    assert main(["calibrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"].items() <= json.loads(path.read_text()).items()

"""A machine with a GPU, the profile that calibration measured there, and what `kvplan calibrate` answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.cli import main
from kvplan.cost.profile import default
from kvplan.cuda.machine import Link, Machine

H100 = Machine("NVIDIA H100", "580.1", Link(1, 16, 5, 16), 13000, "0000:0f:00.0", 0)


MEASURED = replace(
    default(), gpu="NVIDIA H100", driver="580.1", generation=5, width=16, how="calibrated", multiprocessors=132,
    made="kvplan 0.1.0, 2026-11-21, 900 samples", note="",
)  # fmt: skip


def text(capsys, *argv: str) -> tuple[str, str]:
    """What a command that is well answers at 80 columns, and what it notes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "80")
        patch.delenv("FORCE_COLOR", raising=False)
        assert main(["calibrate", *argv]) == 0
    return capsys.readouterr()


def complaint(capsys, *argv: str) -> str:
    """The one line of a command that is refused."""
    assert main(["calibrate", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err

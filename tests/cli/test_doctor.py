"""What `kvplan doctor` answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.cli import machine as doctor
from tests.commands import BLOCKED, answer, document, hold_screen, python
from tests.measure.doctor_facts import GPU_LESS, HEALTHY, SLOW, UNREACHABLE


@pytest.fixture
def sees(monkeypatch):
    """``sees(facts)``: the machine is as these facts say; gives what is asked of it."""
    asked = []

    def seeing(facts):
        def gather(device, *, busy):
            asked.append((device, busy))
            return replace(facts, device=device)

        monkeypatch.setattr(doctor, "gather", gather)
        return asked

    return seeing


def test_it_reads_well_at_80_columns(capsys, sees):
    asked = sees(SLOW)
    hold_screen("doctor", answer(capsys, "doctor", code=1))
    assert asked == [("cuda:0", True)]


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (HEALTHY, 0),
        (UNREACHABLE, 0),  # a warning
        (SLOW, 1),
        (GPU_LESS, 1),
    ],
)
def test_a_problem_is_a_finding(capsys, sees, facts, code):
    sees(facts)
    assert ("problem" in answer(capsys, "doctor", code=code)) == bool(code)
    given = document(capsys, "doctor", code=code)
    assert given["healthy"] == (code == 0)


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["doctor"], ["doctor", "--json"]])
def test_it_runs_on_any_machine_and_imports_nothing_large(argv):
    blocked = ["torch", "triton", "cuda", "numba"] + ["rich"] * ("--json" in argv)
    done = python("-c", BLOCKED.format(blocked=blocked, argv=argv))
    assert (done.returncode, done.stderr) == (1, "")  # without numba there is a problem, with a GPU or without
    assert "not to be had" in done.stdout

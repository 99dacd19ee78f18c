"""Files are checked before a command works, and a long command shows its progress."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace

import pytest
from rich import progress as rich

from kvplan import KVPlanError
from kvplan.cli import main
from kvplan.cli.screen import documents, printing
from tests.commands import GPU, HOST, X_PACKED, answer


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", GPU, "--svg"),
        ("inspect", GPU, "--png"),
        ("report", GPU, HOST, "--output"),
        ("bench", "--device", "cpu", "--output"),
        ("bench", "--device", "cpu", "--plot"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_the_first_and_only_answer(capsys, tmp_path, command):
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    for name in (tmp_path / "missing" / "file.svg", folder):
        assert main([*command, str(name)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"kvplan: {command[-1]} '{name}' cannot be written: ")
        assert err.count("\n") == 1


def test_a_check_leaves_an_existing_file_alone(tmp_path):
    file = tmp_path / "kept"
    file.write_text("as before")
    documents.check_file("--output", str(file))
    assert file.read_text() == "as before"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(KVPlanError, match="--output '' cannot be written: "):
        documents.check_file("--output", "")


class Bar:
    """A progress bar that records what it is told."""

    def __init__(self, *columns, console, transient):
        self.started, self.told, self.stopped = Event(), [], False
        assert console.stderr
        Bar.last = self

    def add_task(self, text, total):
        self.told.append((text, total))
        return 0

    def start(self):
        self.started.set()

    def update(self, task, *, description, completed, total):
        self.told.append((description, completed, total))

    def stop(self):
        self.stopped = True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(rich, "Progress", Bar)
    monkeypatch.setattr(printing, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))


@pytest.mark.usefixtures("terminal")
def test_a_bar_appears_once_the_patience_is_over_and_goes_with_the_work():
    with printing.progress(after=0.0) as tell:
        assert Bar.last.started.wait(60)
        tell(0.25, "order 1 of 4")
        tell(None, "verifying")
    assert Bar.last.told[1:] == [("order 1 of 4", 0.25, 1), ("verifying", 0, None)]
    assert Bar.last.stopped


@pytest.mark.usefixtures("terminal")
def test_quick_work_shows_none():
    with printing.progress(after=3600.0) as tell:
        tell(None, "done at once")
    assert not Bar.last.started.is_set()
    assert Bar.last.stopped


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("diff", GPU, HOST), "order 1 of"),
        (("verify", GPU, HOST, "--blocks", "1"), "moving markers"),
        (("advise", X_PACKED), "order 1 of"),
    ],
    ids=["diff", "verify", "advise"],
)
def test_commands_tell_what_they_do(capsys, command, told):
    answer(capsys, *command)
    assert any(text.startswith(told) for text, *_ in Bar.last.told)


def test_a_pipe_gets_no_bar(monkeypatch, capsys):
    monkeypatch.setattr(rich, "Progress", None)  # would raise
    answer(capsys, "diff", GPU, HOST)


def test_no_advice_searches_no_orders(monkeypatch, capsys, tmp_path):
    shown = answer(capsys, "diff", GPU, HOST, "--no-advice")
    assert "better" not in shown
    assert "breaks" in shown
    answer(capsys, "report", GPU, HOST, "--no-advice", "--output", str(tmp_path / "page.html"))
    assert "orders" not in (tmp_path / "page.html").read_text()

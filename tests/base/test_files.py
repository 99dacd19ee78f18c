"""Files are written whole; what is no file is left what it is."""

from __future__ import annotations

import os
import stat
import threading

from kvplan.base.files import write_whole
from tests.patience import PATIENCE


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, b"whole")
    reader.join(PATIENCE)
    assert got == [b"whole"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    file.write_bytes(b"old")
    link.symlink_to(file)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"
    assert [one.name for one in (tmp_path / "folder").iterdir()] == ["file"]
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "folder" / "made")
    write_whole(dangling, b"new")
    assert (tmp_path / "folder" / "made").read_bytes() == b"new"

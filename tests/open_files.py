"""The files that a process has open: what a test must not leave behind."""

from __future__ import annotations

import gc
import os

from tests.patience import until

FOLDER = "/proc/self/fd"
Files = set[tuple[int, str]]


def open_files() -> Files:
    """Return the descriptors of this process, with what each is for."""
    found: Files = set()
    for number in map(int, os.listdir(FOLDER)):
        try:
            found.add((number, os.readlink(f"{FOLDER}/{number}")))
        except FileNotFoundError:  # the listing's own, or another thread has closed it
            continue
    return found


def leaves_no_file(before: Files) -> None:
    """Wait until no file is open that was not open before. Files of earlier tests may be closed meanwhile."""

    def gone() -> bool:
        if open_files() <= before:
            return True
        gc.collect()
        return open_files() <= before

    until(gone)

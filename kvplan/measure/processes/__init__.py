"""Transfers between this process and another one on the same machine, timed beside those of one process."""

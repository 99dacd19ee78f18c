"""Packing: a plan becomes two halves that meet in chunks, so that a wire carries few large messages."""

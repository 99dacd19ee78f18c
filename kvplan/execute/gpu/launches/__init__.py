"""Launches of the copy kernel: their headers, launches that are known, and launches that are prepared ahead."""

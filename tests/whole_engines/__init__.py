"""Whole vLLM engines on the CPU, each in a process of its own: `make test-engines`."""

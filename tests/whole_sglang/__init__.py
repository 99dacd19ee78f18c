"""Whole SGLang engines on the CPU, each in processes of its own: `make test-sglang`."""

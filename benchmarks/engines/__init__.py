"""Whole vLLM engines: the time to a user's first token when the host holds the prompt's prefix.

``python -m benchmarks.engines`` starts an engine for each way of offloading, side by side on one GPU, and takes the
ways in turn; see README.md beside this file.
"""

"""Whole vLLM engines: the time to a user's first token when the host holds the prompt's prefix.

``python -m benchmarks.engines`` starts an engine for each way of offloading, one after another, each alone on the GPU;
see README.md in the folder above.
"""

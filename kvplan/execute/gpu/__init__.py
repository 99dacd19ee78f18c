"""Executor for copies between host memory and one GPU, and within the GPU."""

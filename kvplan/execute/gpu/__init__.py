"""Copies between host memory and one GPU, and within it."""

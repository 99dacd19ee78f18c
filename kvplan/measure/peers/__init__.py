"""Baselines between the memories of two GPUs."""

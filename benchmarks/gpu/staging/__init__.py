"""Gather and scatter of packed transfers, alone on one GPU: ``python -m benchmarks.gpu.staging``."""

"""GPU memory to GPU memory in one process: ``python -m benchmarks.gpu.peer``."""

"""The CUDA driver, and one GPU."""

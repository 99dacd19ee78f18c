"""CUDA's driver, and one GPU. :func:`use` hands in another driver, such as a simulated one."""

from kvplan.cuda.driver import use

__all__ = ["use"]

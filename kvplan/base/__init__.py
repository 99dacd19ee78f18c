"""Tools for every package of kvplan: files, numbers, limits, threads and processes."""

__version__ = "0.2.0"  # here, so that a build reads it without an import of the package

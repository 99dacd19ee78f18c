"""Tools for every package of kvplan: files, numbers, limits, threads and processes."""

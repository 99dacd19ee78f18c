"""Tools that every room may use: files, numbers, limits, threads and processes."""

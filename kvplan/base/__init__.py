"""What every room may use: files, numbers, limits, and what threads and processes need."""

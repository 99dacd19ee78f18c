"""Memory for layouts: pools, pinned memory, memory that processes share, and reserved addresses."""

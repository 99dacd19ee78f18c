"""Memory for layouts: pools, pinned memory, memory shared by processes, and reserved addresses."""

"""Block ids in, copies out."""

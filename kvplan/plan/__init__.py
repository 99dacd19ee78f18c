"""Plans of transfers: block ids in, contiguous copies out."""

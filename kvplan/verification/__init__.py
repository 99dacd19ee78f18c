"""Verification on live pools: a real transfer is compared byte by byte with what the layouts say."""

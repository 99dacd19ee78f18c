"""Verification on live pools: the bytes that a real transfer wrote are compared with the addresses of the layouts."""

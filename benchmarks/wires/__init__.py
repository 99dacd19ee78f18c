"""Packed transfers between two processes by NIXL, beside a descriptor for each row and one large message."""

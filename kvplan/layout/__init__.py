"""Where the bytes of a KV cache are."""

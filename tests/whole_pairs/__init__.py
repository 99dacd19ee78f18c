"""Whole vLLM engines in pairs: one computes prompts, the other takes their KV cache by NIXL and decodes."""

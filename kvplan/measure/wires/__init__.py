"""The costs of a wire between two processes, measured through NIXL."""

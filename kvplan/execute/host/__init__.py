"""The host path: copies between CPU memories."""

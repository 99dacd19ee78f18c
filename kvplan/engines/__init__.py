"""Adapters that connect kvplan to serving engines. An engine is imported only when its adapter is used."""

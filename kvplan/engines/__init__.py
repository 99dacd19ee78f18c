"""Adapters that plug kvplan into serving engines. An engine is imported only when its adapter is used."""

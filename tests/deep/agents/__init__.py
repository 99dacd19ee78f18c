"""Agents of real processes under load: transfers, kills and cards; see ``__main__``."""

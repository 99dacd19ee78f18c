"""The version, in a file of its own, which a build reads without importing the package."""

__version__ = "0.1.0"

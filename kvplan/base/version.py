"""The version of kvplan, in a separate file that a build reads without an import of the package."""

__version__ = "0.2.0"

"""Which version this tree says it is."""

__version__ = "0.5.17"

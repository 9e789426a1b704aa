"""The vocabulary that all services share."""

__version__ = "0.1.0"

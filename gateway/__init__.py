"""The public door."""

"""Model definitions and their loading."""

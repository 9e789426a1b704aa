"""Data from the target, fitting and judging of draft heads."""

"""Drafters, and their service."""

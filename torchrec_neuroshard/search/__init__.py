"""Searches over column splits and ranks."""

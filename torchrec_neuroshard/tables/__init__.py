"""Describe embedding tables and their inputs, and read them from files."""

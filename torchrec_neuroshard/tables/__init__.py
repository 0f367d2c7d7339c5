"""Embedding tables and their inputs: descriptions, profiles and files."""

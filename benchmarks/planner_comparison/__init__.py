"""Modules of `benchmarks/compare_planners.py`."""

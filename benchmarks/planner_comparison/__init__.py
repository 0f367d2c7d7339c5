"""The parts of `benchmarks/compare_planners.py`."""

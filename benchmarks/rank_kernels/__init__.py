"""Kernels of a rank whose costs are estimates: the cases of `gpu/kernels.py`."""

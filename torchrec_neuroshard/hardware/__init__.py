"""Devices: published figures of GPUs, their state, and the installed packages."""

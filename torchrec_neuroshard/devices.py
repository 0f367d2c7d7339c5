"""Which CPU or GPU this is."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["cpu_name", "current_device_name"]


def cpu_name() -> str:
    """Model name of this machine's CPU, with family and model number."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name", platform.machine())
    return f"{name} ({fields.get('cpu family', '?')}/{fields.get('model', '?')})"


def current_device_name(device_type: str) -> str | None:
    """Name of this machine's first device of a type; None if it has none."""
    if device_type == "cpu":
        return cpu_name()
    if device_type == "cuda":
        import torch

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name(0))
    return None

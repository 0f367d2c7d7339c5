"""Device types by their names in torch, without torch."""

from __future__ import annotations

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Device type, as torch calls it -> backend of its collectives. All types except the
CPU are accelerators with their own torch module, e.g. `torch.cuda`."""

GPU = "cuda"
"""Device type of the cards in `cards`, as torch calls it."""


def is_accelerator(device_type: str) -> bool:
    """Whether a device type is anything but the CPU."""
    return device_type != "cpu"


def backend_of(device_type: str) -> str:
    """Return the collective backend of a device type; gloo for unknown types."""
    return BACKENDS.get(device_type, "gloo")


def device_type_of(backend: str) -> str:
    """Return the device type that a collective backend belongs to."""
    return next(device for device, its in BACKENDS.items() if its == backend)

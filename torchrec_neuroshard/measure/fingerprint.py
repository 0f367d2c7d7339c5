"""Where a measurement is taken."""

from __future__ import annotations

import torch

from torchrec_neuroshard.hardware.devices import accelerator, cpu_name, is_accelerator
from torchrec_neuroshard.measure.kernels import fbgemm_version
from torchrec_neuroshard.measure.records import Fingerprint

__all__ = ["device_fingerprint"]


def device_fingerprint(device: torch.device, num_threads: int) -> Fingerprint:
    """Describe the device and libraries at hand."""
    name = cpu_name()
    if is_accelerator(device.type):
        name = accelerator(device.type).get_device_name(device)
    return Fingerprint(
        device=name,
        device_type=device.type,
        num_threads=num_threads,
        torch=torch.__version__,
        fbgemm=fbgemm_version(),
    )

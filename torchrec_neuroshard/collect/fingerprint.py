"""Where a measurement is taken."""

from __future__ import annotations

import torch

from torchrec_neuroshard.collect.tbe import fbgemm_version
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.records import Fingerprint

__all__ = ["device_fingerprint"]


def device_fingerprint(device: torch.device, num_threads: int) -> Fingerprint:
    """Describe the device and libraries at hand."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = cpu_name()
    return Fingerprint(
        device=name,
        device_type=device.type,
        num_threads=num_threads,
        torch=torch.__version__,
        fbgemm=fbgemm_version(),
    )

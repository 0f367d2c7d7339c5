"""Python imports this when it starts: a process with paper GPUs gets them here."""

import importlib
import os

if os.environ.get("PAPER_CUDA_LIBRARY"):
    importlib.import_module("tests.paper_gpu.device")

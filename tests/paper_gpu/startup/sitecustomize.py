"""Python imports this when it starts: a process with paper GPUs gets them here."""

import importlib
import os
import sys
import traceback

if os.environ.get("PAPER_CUDA_LIBRARY"):
    try:
        importlib.import_module("tests.paper_gpu.device")
    except Exception as error:  # Python would print it, and go on without paper GPUs
        sys.stderr.write(f"{traceback.format_exc()}\nno paper GPU: {error}\n")
        os._exit(70)

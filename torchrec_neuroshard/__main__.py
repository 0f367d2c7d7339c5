"""Run the `neuroshard` command as `python -m torchrec_neuroshard`."""

import sys

from torchrec_neuroshard.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m torchrec_neuroshard`: the same as the `neuroshard` command."""

import sys

from torchrec_neuroshard.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Compare planners by timing the kernels of their plans.

    python benchmarks/compare_planners.py --tables real_tables.json \
        --out reproduced/planners

Every planner makes a plan for each task (tables, ranks, batch, memory). This machine
then times the kernels of all plans, one rank after another. Times of collectives are
published measurements. `--scaled-to h100` does this a second time for kernels as many
times faster as an H100's. After each task `<out>.json.xz` is written, at the end
`<out>.md` (the page) and two charts.

`--minutes 60` ends the run after an hour; tasks that are not done by then are left out.
The machine must be quiet unless `--noisy` is given. `--quick` is a dry run of a few
minutes. `--device cuda` times kernels on a GPU.

NeuroShard's nets and policies come from the folder `--trained`. Without it, planners
that need nets are left out, and AutoShard and DreamShard use the shipped policies.
Without `--tables`, the DLRM dataset's tables come from a generator, and EMBark is left
out. `check_figures.py --write` writes the page and the charts again from the data.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # One thread for all libraries, here and in the processes started from here.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Import it only here, since those processes import this file, too.
    from planner_comparison.run import main

    main()

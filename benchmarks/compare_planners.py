"""Compare planners on kernels that are run for real.

    python benchmarks/compare_planners.py --tables real_tables.json \
        --out reproduced/planners

Every planner makes a plan for each task (tables, ranks, batch, memory) and each cluster
that the task is judged on. The kernels of each rank of all plans are timed one rank
after another on this machine. The plans' collectives are what others measured on the
cluster. Three files are written after each task: `<out>.json` (the run and its tasks),
`<out>_plans.parquet` (a row a plan) and `<out>.md` (what the tasks say together).

NeuroShard's own nets and policies come from the folder `--trained`. Planners that need
nets are left out without it; AutoShard and DreamShard then plan by the policies that
ship. `--every 10` takes a tenth of the tasks, `--quick` is a dry run of a few minutes,
`--device cuda` times kernels on a GPU. Without `--tables` the DLRM dataset's tables
come from the package's generator and EMBark is left out. `--readme README.md` runs
nothing and renews the table in that file from the results of `--out`.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # Of all libraries, here and in the processes that this one starts.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Only here: those processes import this file, too.
    from planner_comparison.run import main

    main()

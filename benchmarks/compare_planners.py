"""Compare planners by timing the kernels of their plans.

    python benchmarks/compare_planners.py --tables real_tables.json \
        --out reproduced/planners

Every planner makes a plan for each task (tables, ranks, batch, memory) and each of the
task's clusters. This machine then times the kernels of all plans, one rank after
another. Times of collectives are published measurements of the cluster. Three files are
written after each task: `<out>.json` (the run and its tasks), `<out>_plans.parquet`
(one row per plan) and `<out>.md` (tables over all tasks).

NeuroShard's nets and policies come from the folder `--trained`. Without it, planners
that need nets are left out, and AutoShard and DreamShard use the shipped policies.
`--every 10` runs a tenth of the tasks, `--quick` is a dry run of a few minutes,
`--device cuda` times kernels on a GPU. Without `--tables`, the DLRM dataset's tables
come from a generator, and EMBark is left out. `--readme README.md` runs nothing and
renews the table in that file from the results of `--out`.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # One thread for all libraries, here and in the processes started from here.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Import it only here, since those processes import this file, too.
    from planner_comparison.run import main

    main()

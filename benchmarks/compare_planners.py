"""Compare planners on kernels that are run for real.

    python benchmarks/compare_planners.py --tables real_tables.json \
        --out reproduced/planners

For each task (tables, ranks, batch, memory) and each cluster that it is judged on,
every planner makes a plan. The kernels of each rank of all plans are timed one rank
after another on this machine; the plans' collectives are what others measured on the
cluster. After each task are written: `<out>.json` (the run and its tasks),
`<out>_plans.parquet` (a row a plan), `<out>_passes.parquet` (every timed pass), `.md`
(what the tables say together) and `.html` (each task and figures, too). The same
command goes on where a run was cut off, or where it ended because the machine was too
slow.
Nets of NeuroShard's own, policies and a calibrated bundle come from the folder
`--trained`. Without it planners that need them are left out, but AutoShard and
DreamShard plan by the policies that ship.
`--every 10` takes a tenth of the tasks, `--quick` is a dry run of a few minutes;
`--device cuda` times kernels on a GPU. Without --tables the DLRM dataset's tables come
from the package's generator and EMBark is left out.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # Of all libraries, here and in the processes that this one starts.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Only here: those processes import this file, too.
    from planner_comparison.run import main

    main()

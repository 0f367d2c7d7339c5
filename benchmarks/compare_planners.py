"""Compare planners on tasks whose plans are run for real.

    python benchmarks/compare_planners.py --tables real_tables.json \
        --out benchmarks/results/planners_cpu_epyc_zen5_202611

For each task (tables, ranks, batch, memory) every planner makes a plan. The fused
kernels of each rank are timed one rank after another; the plans' collectives are timed
among as many processes as there are ranks. Both are added up to the critical path of
one iteration. `<out>.json` (everything), `.md`, `.html` and a figure of each family are
written after each task; the same command goes on where a run was cut off. `--quick` is
a dry run of a few minutes; `--device cuda` times kernels on a GPU and predicts
collectives. Without --tables the DLRM dataset's tables come from the package's
generator and EMBark is left out.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # Of all libraries, here and in the processes that this one starts.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Only here: those processes import this file, too.
    from planner_comparison.run import main

    main()

#!/usr/bin/env bash
# Everything that is to be measured on one GPU, in steps of at most ten minutes.
#
#   benchmarks/gpu/run_all.sh              all steps, in order
#   benchmarks/gpu/run_all.sh smoke probe  only these
#
# Steps: smoke probe collect train plans columns demo calibrate transfer bandwidth
# `train`, `transfer` and `bandwidth` need no GPU; `collect` and `plans` may be given
# again until they are through.
#
#   OUT=benchmarks/gpu/out     results; what is there already is gone on with
#   IN=...                     folder of earlier results, copied to OUT first
#   DEVICE=cuda                cpu: a dry run
#   QUICK=                     1: sizes of a dry run
#   TABLES=                    JSON file of real tables to draw from
#   MINUTES=9.5                most minutes of a step's measuring
#   PYTHON=python3
#
# A step that fails does not keep the later ones from running; the exit code is 1 then.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
OUT=${OUT:-benchmarks/gpu/out}
DEVICE=${DEVICE:-cuda}
QUICK=${QUICK:-}
PYTHON=${PYTHON:-python3}
MINUTES=${MINUTES:-9.5}
SEED=20261123
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1 PYTHONHASHSEED=0
mkdir -p "$OUT" || exit 2
OUT=$(realpath "$OUT")
[ -z "${TABLES:-}" ] || TABLES=$(realpath "$TABLES")
PYTHON=$(command -v "$PYTHON") && PYTHON=$(realpath -s "$PYTHON") || exit 2
if [ -n "${IN:-}" ] && [ "$IN" != "$OUT" ]; then cp -rn "$IN"/. "$OUT"/; fi

tables=(${TABLES:+--tables "$TABLES"})
bundle="$OUT/bundle"
limit=$("$PYTHON" -c "print(int(60 * $MINUTES))")
small=() # what keeps a dry run small
if [ -n "$QUICK" ]; then
    small=(--max-gib 0.002 --max-lookups 3000 --max-shards 4 --batch-sizes 64 256)
    limit=70
fi

pick() { # the first in a dry run
    if [ -n "$QUICK" ]; then echo "$1"; else echo "$2"; fi
}

neuroshard() { "$PYTHON" -m torchrec_neuroshard "$@"; }

collect() { # file, number of sets, seconds
    neuroshard collect compute --device "$DEVICE" --out "$1" --num-sets "$2" \
        --seed "$SEED" --time-limit "$3" "${tables[@]}" "${small[@]}"
}

smoke() {
    neuroshard doctor || true # tells; the sets below decide
    command -v nvidia-smi >/dev/null && nvidia-smi
    "$PYTHON" benchmarks/gpu/smoke.py --device "$DEVICE" --out "$OUT/smoke.json" \
        ${QUICK:+--max-gib 0.002 --num-sets 1}
}

probe() { # Are times steady, is anything throttled or left out?
    collect "$OUT/probe.parquet" "$(pick 6 200)" 60
}

# Three times: a set that breaks the device ends the process and is left out then.
collect_sets() {
    local file="$OUT/compute.parquet"
    local end=$(($(date +%s) + limit)) left
    for _ in 1 2 3; do
        left=$((end - $(date +%s)))
        [ "$left" -gt 10 ] || break
        collect "$file" "$(pick 140 8000)" "$left" && return 0
    done
    return 1
}

train() {
    neuroshard train "$OUT/compute.parquet" --out "$bundle" \
        ${QUICK:+--epochs 3 --members 2}
}

plans() { # Given again, it goes on with the tasks that are left.
    local size=(--batch-size 65536 --max-rows 10000000 --kernel-rounds 2
        --planning-processes 8 --planners default neuroshard
        torchrec "torchrec, best practice")
    [ -z "$QUICK" ] || size=(--quick --num-tasks 1)
    # By names that hold wherever OUT lies: the file is gone on with by its options.
    (cd "$OUT" && "$PYTHON" "$root/benchmarks/compare_planners.py" --device "$DEVICE" \
        --cost-model bundle --out planners "${tables[@]}" \
        --stop-after "$limit" "${size[@]}")
}

columns() {
    "$PYTHON" benchmarks/gpu/columns.py --device "$DEVICE" --out "$OUT/columns.json" \
        ${QUICK:+--rows 2000 --batch-size 128}
}

demo() { # One rank: predicted beside measured.
    local size=(--max-rows 10000000 --batch-size 8192)
    [ -z "$QUICK" ] || size=(--max-rows 2000 --embedding-dim 16 --min-partition 4
        --batch-size 128 --pairs 2 --block-iterations 3)
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 \
        benchmarks/race_plans.py --device "$DEVICE" --cost-model "$bundle" \
        --output "$OUT/demo.json" "${size[@]}"
}

calibrate() { # What a user with another GPU of the kind runs.
    neuroshard calibrate --from "$bundle" --device "$DEVICE" --out "$OUT/calibrated" \
        --num-samples "$(pick 120 300)" --seed 1 --time-limit "$(pick 150 120)" \
        ${QUICK:+--max-gib 0.002 --steps 5}
}

transfer() { # From a CPU's bundle: what a user with a new kind of card needs to measure.
    local sizes=(100 300 1000)
    [ -z "$QUICK" ] || sizes=(30)
    "$PYTHON" benchmarks/bench_transfer.py "$OUT/compute.parquet" --source cpu_epyc \
        --sizes "${sizes[@]}" --seeds "$(pick 1 3)" --out "$OUT/transfer"
}

bandwidth() { # How near kernels come to a copy, and what decides it.
    "$PYTHON" benchmarks/gpu/bandwidth.py "$OUT/compute.parquet" \
        --smoke "$OUT/smoke.json" --out "$OUT/bandwidth"
}

declare -A seconds=([smoke]=150 [probe]=120 [collect]=$((limit + 25)) [train]=3600
    [plans]=590 [columns]=180 [demo]=180 [calibrate]=420 [transfer]=3600 [bandwidth]=300)
order=(smoke probe collect train plans columns demo calibrate transfer bandwidth)
[ $# -eq 0 ] || order=("$@")
failed=()
for step in "${order[@]}"; do
    if [ -z "${seconds[$step]:-}" ]; then
        echo "no step '$step'; known: ${!seconds[*]}" >&2
        exit 2
    fi
    work=$step
    [ "$step" != collect ] || work=collect_sets
    echo "== $step, $(date -u +%H:%M:%S)"
    start=$(date +%s)
    # In a process group of its own, so that a step that is too long ends whole.
    set -m
    { $work; } > >(tee "$OUT/$step.log") 2>&1 &
    job=$!
    (sleep "${seconds[$step]}" && kill -- "-$job") 2>/dev/null &
    guard=$!
    wait "$job"
    code=$?
    kill -- "-$guard" 2>/dev/null
    set +m
    [ "$code" -eq 0 ] || failed+=("$step")
    echo "== $step: exit code $code after $(($(date +%s) - start)) s"
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }

#!/usr/bin/env bash
# Measure on a GPU that is at hand for minutes, by two commands that end by themselves.
#
#   loan.sh one    find a form of FBGEMM that works; time the plans of plans.pkl, then
#                  kernels whose costs are estimates, then tables in host memory;
#                  train two ranks on the one card; measure sets as plans hold them
#   loan.sh two    take that form again; time the new plans of plans.pkl, then measure
#                  other sets until the end
#
# Before each, on a CPU, plans.py makes plans, and prepare.sh fills the folder GPU.
# Before `two`, `how` (the form, from the results of `one`) goes to GPU, too.
#
#   OUT             results, renewed every 15 s: cat one.tgz.* | tar xz -C folder
#   LIMIT           seconds that the command may take, all told: 420 for one, 230 for two
#   GPU=.gpu        FBGEMM's packs, plans.pkl, real_tables.json, how
#   NUM             sets to measure; without it, as many as there is time for
#   WORK, SITE      folders for results and for FBGEMM
#   PYTHON=python3
#   DEVICE=cuda     cpu, with QUICK=1: a rehearsal
set -uo pipefail
refuse() {
    echo "loan.sh: $1. Usage: OUT=folder [LIMIT=seconds] loan.sh one|two" >&2
    exit 2
}
cd "$(dirname "$0")/../.." || exit 2
phase=${1:-} GPU=${GPU:-.gpu} NUM=${NUM:-}
DEVICE=${DEVICE:-cuda} QUICK=${QUICK:-} PYTHON=${PYTHON:-python3}
WORK=${WORK:-/tmp/neuroshard_gpu} SITE=${SITE:-/tmp/site}
case $phase in
one) LIMIT=${LIMIT:-420} PLANS=200 SEED=1 ;;
two) LIMIT=${LIMIT:-230} PLANS=110 SEED=2 ;;
*) refuse "no step '$phase'" ;;
esac
WORK=$WORK/$phase # plans of `one` and `two` have the same names
[ -n "${OUT:-}" ] || refuse "OUT is not set"
[[ $LIMIT =~ ^[0-9]+$ ]] || refuse "LIMIT=$LIMIT is not a number of seconds"
[ -d "$GPU" ] || refuse "there is no folder $GPU; prepare.sh makes it"
[ -s "$GPU/plans.pkl" ] || refuse "$GPU/plans.pkl is missing; plans.py makes it"
mkdir -p "$OUT" "$WORK" || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1 PYTHONHASHSEED=0
exec > >(tee -a "$WORK/$phase.log") 2>&1

# Seconds that are kept: for the last save, for a step to end after it was told to, for
# its last task.
SAVING=8 ENDING=10 LAST=5
# Most seconds of steps; plans come first, and sets get what is left.
KERNELS=100 HOST_MEMORY=60 TWO_RANKS=60
# Exit codes of a script and of neuroshard: only a new process can use the device.
# neuroshard's 2 is also bad input, which fails again at once.
DEVICE_FAILED=3 COLLECT_FAILED=2

say() { echo "== $SECONDS s: $*"; }
left() { echo $((LIMIT - SAVING - SECONDS)); }

save() { # All results, in pieces of at most 15 MiB; each is replaced by one rename.
    local piece count=0
    rm -rf "$WORK.copy" "$OUT"/part.* && mkdir "$WORK.copy" || return
    cp "$WORK"/* "$WORK.copy"
    tar cz -C "$WORK.copy" . | split -b 15m - "$OUT/part." || return
    for piece in "$OUT"/part.*; do
        mv "$piece" "$OUT/$phase.tgz.${piece##*.}" && count=$((count + 1))
    done
    for piece in "$OUT/$phase.tgz".*; do # an earlier archive may have had more pieces
        [ $((count--)) -gt 0 ] || rm "$piece"
    done
}

save_often() {
    trap exit TERM
    while :; do
        sleep 15 &
        wait $!
        save
    done
}

finish() {
    kill "$saver" && wait "$saver"
    save 2>/dev/null
    say "results are in $OUT"
    ls -l "$OUT"
}
save_often >/dev/null 2>&1 &
saver=$!
trap finish EXIT

step() { # Name, most seconds, command: it is ended when they, or LIMIT, are over.
    local seconds code
    seconds=$(left)
    [ "$seconds" -lt "$2" ] || seconds=$2
    if [ "$seconds" -le "$ENDING" ]; then
        say "no time for: $1"
        return 124
    fi
    say "$1, for at most $seconds s"
    timeout -k $((ENDING - 1)) $((seconds - ENDING)) "${@:3}"
    code=$?
    say "$1: exit code $code"
    return $code
}

unpack() { # Form of FBGEMM: a folder of GPU, and perhaps an option.
    # Unquoted, since the option is a word of its own.
    step "FBGEMM, $1" 60 "$PYTHON" "$GPU/unpack_fbgemm.py" "$GPU"/$1 --dest "$SITE" \
        --no-verify && . "$SITE/env.sh"
}

passes_checks() { # A broken copy of FBGEMM fails nearly all; a check itself may be wrong.
    step "checks of FBGEMM" 70 "$PYTHON" "$GPU/smoke_fbgemm.py" --device "$DEVICE" 2>&1 |
        tee "$WORK/fbgemm.txt"
    awk '/^ok / { ok++ } /^FAIL / { bad++ } END { exit !(ok > 4 && ok > 2 * bad) }' \
        "$WORK/fbgemm.txt"
}

find_fbgemm() { # Unpack one form of FBGEMM after another until a copy works.
    local form known=""
    [ ! -s "$GPU/how" ] || known=$(cat "$GPU/how")
    for form in ${known:+"$known"} "in_place --alone" in_place moved; do
        # TorchRec is in the other pack alone.
        [ "$form" != moved ] || unpack in_place || continue
        unpack "$form" || continue
        if [ "$form" = "$known" ] || passes_checks; then
            echo "$form" >"$WORK/how"
            return
        fi
    done
    say "no form of FBGEMM works here, so nothing is measured; fbgemm.txt says why"
    return 1
}

script() { # Name, most seconds, kept seconds, script with options.
    # It ends by itself. If the device failed, a new process continues its files.
    local end=$((SECONDS + $2)) seconds budget code try
    for try in 1 2 3; do
        seconds=$(left)
        [ "$seconds" -lt $((end - SECONDS)) ] || seconds=$((end - SECONDS))
        budget=$((seconds - ENDING - $3))
        step "$1" "$seconds" "$PYTHON" "${@:4}" --device "$DEVICE" \
            --seconds $((budget > 0 ? budget : 1))
        code=$?
        case $code in "$DEVICE_FAILED" | "$COLLECT_FAILED") ;; *) return $code ;; esac
        say "$1: the device failed in try $try"
    done
    return $code
}

failed=0
cp "$GPU/commit" "$WORK" 2>/dev/null # which commit this is; prepare.sh has noted it
[ "$DEVICE" = cpu ] || step nvidia-smi 20 nvidia-smi
if [ "$DEVICE" != cpu ] || [ -e "$GPU/unpack_fbgemm.py" ]; then
    find_fbgemm || exit 1
fi
quick=${QUICK:+--quick}
script plans "$PLANS" "$LAST" benchmarks/gpu/plans.py time "$GPU/plans.pkl" \
    --out "$WORK/passes.pkl" || failed=1
if [ "$phase" = one ]; then
    script kernels "$KERNELS" "$LAST" benchmarks/gpu/kernels.py $quick \
        --out "$WORK/kernels.parquet" || failed=1
    script "host memory" "$HOST_MEMORY" "$LAST" benchmarks/gpu/kernels.py $quick \
        --out "$WORK/uvm.parquet" --kinds uvm || failed=1
    script "two ranks" "$TWO_RANKS" "$LAST" benchmarks/gpu/two_ranks.py \
        --out "$WORK/two_ranks.json" || failed=1
fi
tables=$GPU/real_tables.json
[ -e "$tables" ] || tables=
# Sets of plans draw their batches from the upper half: 65,536 to 1,048,576 samples.
sizes="--batch-sizes 4096 1048576 --max-gib 24"
[ -z "$QUICK" ] ||
    sizes="--batch-sizes 64 256 --max-gib 0.002 --max-lookups 3000 --set-seconds 0"
script sets "$(left)" "$LAST" -m torchrec_neuroshard collect compute --plan-share 1 \
    $sizes --seed "$SEED" --num-sets "${NUM:-20000}" --out "$WORK/sets.jsonl" \
    ${tables:+--tables "$tables"} || failed=1
exit $failed

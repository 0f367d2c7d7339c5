#!/usr/bin/env bash
# Measure on a GPU that is at hand for minutes, by two commands that end by themselves.
#
#   loan.sh one    find a form of FBGEMM that works; measure sets and column shards
#   loan.sh two    take that form again; time the plans of plans.pkl
#
# Before `one`, prepare.sh fills the folder GPU. Before `two`, on a CPU, a bundle is
# trained and plans.py makes plans; plans.pkl and `how` (the form) go to GPU, too.
#
#   OUT             results, renewed every 15 s: cat one.tgz.* | tar xz -C folder
#   LIMIT=480       seconds that the command may take, all told
#   GPU=.gpu        FBGEMM's packs, real_tables.json, plans.pkl, how
#   NUM=20000       sets to measure, more than there is time for
#   WORK, SITE      folders for results and for FBGEMM
#   PYTHON=python3
#   DEVICE=cuda     cpu, with QUICK=1: a rehearsal
set -uo pipefail
refuse() {
    echo "loan.sh: $1. Usage: OUT=folder [LIMIT=seconds] loan.sh one|two" >&2
    exit 2
}
cd "$(dirname "$0")/../.." || exit 2
phase=${1:-} GPU=${GPU:-.gpu} LIMIT=${LIMIT:-480} NUM=${NUM:-20000}
DEVICE=${DEVICE:-cuda} QUICK=${QUICK:-} PYTHON=${PYTHON:-python3}
WORK=${WORK:-/tmp/neuroshard_gpu} SITE=${SITE:-/tmp/site}
[[ $phase =~ ^(one|two)$ ]] || refuse "no step '$phase'"
[ -n "${OUT:-}" ] || refuse "OUT is not set"
[[ $LIMIT =~ ^[0-9]+$ ]] || refuse "LIMIT=$LIMIT is not a number of seconds"
[ -d "$GPU" ] || refuse "there is no folder $GPU; prepare.sh makes it"
[ "$phase" = one ] || [ -s "$GPU/plans.pkl" ] || refuse "$GPU/plans.pkl is missing"
mkdir -p "$OUT" "$WORK" || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1 PYTHONHASHSEED=0
exec > >(tee -a "$WORK/$phase.log") 2>&1

# Seconds that are kept: for the last save, for a step to end after it was told to, for
# the collector to write its file, for columns.py.
SAVING=8 ENDING=10 FOLDING=30 COLUMNS_PY=40

say() { echo "== $SECONDS s: $*"; }
left() { echo $((LIMIT - SAVING - SECONDS)); }

save() { # All results, in pieces of at most 15 MiB; each is replaced by one rename.
    local piece count=0
    rm -rf "$WORK.copy" "$OUT"/part.* && mkdir "$WORK.copy" || return
    # Journals first: one is gone as soon as its records are in the Parquet file.
    cp "$WORK"/*.journal "$WORK.copy"
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

collect() { # Ends by itself after `seconds`, counted from the start of its process.
    local seconds options=()
    seconds=$(($(left) - COLUMNS_PY - FOLDING))
    # Less than the card holds: more sets in the time.
    [ "$DEVICE" = cpu ] || options+=(--batch-sizes 2048 65536 --max-gib 24)
    [ ! -e "$GPU/real_tables.json" ] || options+=(--tables "$GPU/real_tables.json")
    [ -z "$QUICK" ] || options+=(--max-gib 0.002 --max-lookups 3000 --max-shards 4
        --batch-sizes 64 256 --set-seconds 0)
    step collect $((seconds + FOLDING)) "$PYTHON" -m torchrec_neuroshard \
        collect compute --device "$DEVICE" --out "$WORK/compute.parquet" \
        --num-sets "$NUM" --seed 20261123 --time-limit "$seconds" "${options[@]}"
}

failed=0
cp "$GPU/commit" "$WORK" 2>/dev/null # which commit this is; prepare.sh has noted it
[ "$DEVICE" = cpu ] || step nvidia-smi 20 nvidia-smi
if [ "$DEVICE" != cpu ] || [ -e "$GPU/unpack_fbgemm.py" ]; then
    find_fbgemm || exit 1
fi
if [ "$phase" = one ]; then
    step smoke 70 "$PYTHON" benchmarks/gpu/smoke.py --device "$DEVICE" \
        --out "$WORK/smoke.json" --num-sets 2 ${QUICK:+--max-gib 0.002} || failed=1
    collect || failed=1
    step columns "$COLUMNS_PY" "$PYTHON" benchmarks/gpu/columns.py --device "$DEVICE" \
        --out "$WORK/columns.json" ${QUICK:+--rows 2000 --batch-size 128} || failed=1
else
    step plans "$(left)" "$PYTHON" benchmarks/gpu/plans.py time "$GPU/plans.pkl" \
        --device "$DEVICE" --out "$WORK/passes.pkl" \
        --seconds $(($(left) - ENDING - 5)) || failed=1
fi
exit $failed

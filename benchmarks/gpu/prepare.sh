#!/usr/bin/env bash
# Make the tree light enough to travel to a GPU: run on a CPU, before loan.sh.
#
#   benchmarks/gpu/prepare.sh plans.pkl [how]
#       fill .gpu with what loan.sh needs, switch to a branch of only what runs
#   benchmarks/gpu/prepare.sh undo
#       back to main, and the branch is gone; .gpu stays
#
#   plans.pkl          file of `plans.py make`
#   how                the form of FBGEMM that works, from the results of `loan.sh one`
#   SHARED=../shared   folder of FBGEMM's packs (device/) and of real_tables.json (data/)
set -euo pipefail
refuse() {
    echo "prepare.sh: $1" >&2
    exit 1
}
plans=$(realpath -- "${1:-.}") how=${2:+$(realpath -- "$2")}
cd "$(git rev-parse --show-toplevel)"
SHARED=${SHARED:-../shared} LIGHT=gpu-light MOST_MIB=62
undo() {
    git switch -q main
    git branch -q -D "$LIGHT"
}
if [ "${1:-}" = undo ]; then
    undo
    exit
fi
[ $# -ge 1 ] && [ $# -le 2 ] || refuse "name the plans: prepare.sh plans.pkl [how]"
for file in "$plans" ${how:+"$how"}; do
    [ -f "$file" ] || refuse "there is no file $file"
done
[ "$(git branch --show-current)" = main ] || refuse "switch to main first, or undo"
[ -z "$(git status --porcelain)" ] || refuse "git status is not clean: commit first"

mkdir -p .gpu/in_place .gpu/moved
exclude=$(git rev-parse --git-path info/exclude)
grep -qx /.gpu/ "$exclude" || echo /.gpu/ >>"$exclude"
packs="$SHARED/device/packs"
cp -f "$packs"/fbgemm-min_in_place.pack.000 .gpu/in_place/
cp -f "$packs"/fbgemm-min.pack.000 .gpu/moved/
cp -f "$SHARED"/device/{unpack,smoke}_fbgemm.py "$SHARED"/data/real_tables.json .gpu/
[ "$plans" -ef .gpu/plans.pkl ] || cp -f "$plans" .gpu/plans.pkl
[ -z "$how" ] || [ "$how" -ef .gpu/how ] || cp -f "$how" .gpu/how
[ -n "$how" ] || rm -f .gpu/how
git rev-parse --short HEAD >.gpu/commit

git switch -q -c "$LIGHT"
git rm -r -q --ignore-unmatch benchmarks/data benchmarks/results docs tests
git commit -q --no-verify -m "Light tree for a GPU machine, never merged"
files=$(git ls-files | wc -l)
bytes=$(git ls-files -z | tar c --null -T - .gpu | wc -c)
mib=$((bytes / 1024 / 1024))
echo "$mib MiB of 64 travel: $files files and .gpu"
find .gpu -type f -printf '%s bytes  %p\n' | sort -rn
if [ "$mib" -ge "$MOST_MIB" ]; then
    undo
    refuse "more than $MOST_MIB MiB would travel; make .gpu smaller"
fi

#!/bin/bash
# Builds the CUDA runtime without a GPU for a venv with CUDA builds of torch and fbgemm:
#   benchmarks/memory/build.sh VENV TARGET
# It prints what LD_PRELOAD must be for VENV/bin/python to find it.
set -euo pipefail
venv=$1 target=$2 here=$(cd "$(dirname "$0")" && pwd)
packages=$(echo "$venv"/lib/python3*/site-packages)
cuda=$packages/nvidia/cu13
mkdir -p "$target"

names() { nm -D --"$1"-only "$2" | awk '{sub(/@.*/, "", $NF); print $NF}' | sort -u; }
idle() { grep -E "$1" | sed 's/.*/int &() { return 0; }/'; }
link() {  # library, its symbols' version, sources
    local library=$1 version=$2; shift 2
    echo "$version { global: *; };" >"$target/map"
    gcc -shared -fPIC -O1 -w -I"$cuda/include" "$@" -o "$target/$library" \
        -Wl,-soname,"$library" -Wl,--version-script="$target/map"
}

link libcudart.so.13 libcudart.so.13 "$here/cudart.c"
comm -23 <(names defined "$cuda/lib/libcudart.so.13") \
         <(names defined "$target/libcudart.so.13") |
    idle '^(__)?cuda' >"$target/runtime.c"
link libcudart.so.13 libcudart.so.13 "$here/cudart.c" "$target/runtime.c"

# The driver: torch asks it whether a device is in use.
{
    names undefined "$packages/torch/lib/libcaffe2_nvrtc.so" |
        grep -v cuDevicePrimaryCtxGetState | idle '^cu[A-Z]'
    echo 'int cuInit() { return 0; }'
    echo 'int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *on)'
    echo '{ *f = 0; *on = 1; return 0; }'
} >"$target/driver.c"
link libcuda.so.1 libcuda.so.1 "$target/driver.c"

# NVML: fbgemm asks it about links between devices, where a caller wants to know.
names undefined "$packages/fbgemm_gpu/fbgemm_gpu_py.so" | idle '^nvml' >"$target/nvml.c"
link libnvidia-ml.so.1 nvml "$target/nvml.c"
echo "LD_PRELOAD=$(printf '%s:' "$target"/lib*.so.*)"

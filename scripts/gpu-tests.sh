#!/usr/bin/env bash
# The tests that need a GPU, for a machine that has one but no Rust:
#
#   scripts/gpu-tests.sh build     here: programs and test programs into out/gpu (stripped; copy it with the checkout)
#   scripts/gpu-tests.sh run       there: runs them all, from the checkout's root; exit status 1 if one fails
#   scripts/gpu-tests.sh           both, on a machine that has everything
#
# A test that finds no GPU says SKIPPED, and `run` fails then. What needs RDMA or a dmabuf beside it may be skipped.
set -eu -o pipefail
cd "$(dirname "$0")/.."
out=out/gpu
packages=(cuda-vec-add cuda-verbs allreduce-gpu cuda-perf ddp-gpu)

build() {
    rm -rf "$out" && mkdir -p "$out"
    local arguments=()
    for package in "${packages[@]}"; do arguments+=(-p "$package"); done
    # Cargo says where it put each executable: test programs by the name of their file, programs by their own.
    {
        cargo build --release --locked --message-format=json "${arguments[@]}"
        cargo test --release --locked --no-run --message-format=json "${arguments[@]}"
        cargo test --release --locked --no-run --message-format=json -p tinynccl --test cuda --test cuda_faults --test process_group
        cargo test --release --locked --no-run --message-format=json -p ddp-gpt --test gpu
    } |
        python3 -c '
import json, shutil, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message.get("reason") == "compiler-artifact":
        package = message["manifest_path"].split("/")[-2]  # 03-cuda-vec-add, or lib
        package = package.lstrip("0123456789-")
        kind = message["target"]["name"] if message["profile"]["test"] else "program"
        name = package + ("" if kind == "program" else "." + kind + ".test")
        shutil.copy(message["executable"], sys.argv[1] + "/" + name)
' "$out"
    strip "$out"/*
    ls -l "$out"
}

run() {
    [[ -d $out ]] || { echo "nothing in $out: run scripts/gpu-tests.sh build where there is cargo, and copy it here" >&2; return 1; }
    local failed=() log
    # One test at a time: two communicators' kernels on the same GPUs may wait for each other for ever, as NCCL's.
    export RUST_TEST_THREADS=1
    export CUDA_VEC_ADD=$PWD/$out/cuda-vec-add CUDA_VERBS_PROGRAM=$PWD/$out/cuda-verbs
    export ALLREDUCE_GPU=$PWD/$out/allreduce-gpu DDP_GPU=$PWD/$out/ddp-gpu DDP_GPT=$PWD/$out/ddp-gpt
    log=$(mktemp)
    for test in "$out"/*.test; do
        echo "== ${test##*/}"
        "$test" 2>&1 | tee "$log" || failed+=("${test##*/}")
        if grep -Eq '^SKIPPED.*(GPU|libcuda|libnvrtc)' "$log"; then failed+=("${test##*/} (skipped)"); fi
    done
    rm -f "$log"
    if ((${#failed[@]})); then
        echo "FAILED: ${failed[*]}"
        return 1
    fi
    echo "all passed"
}

case ${1-} in
    build) build ;;
    run) run ;;
    '') build && run ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

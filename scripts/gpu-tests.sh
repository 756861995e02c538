#!/usr/bin/env bash
# The tests that need a GPU, for a machine that has one but no Rust:
#
#   scripts/gpu-tests.sh build     here: programs and test programs into out/gpu (stripped; copy it with the checkout)
#   scripts/gpu-tests.sh run       there: runs them all, from the checkout's root; exit status 1 if one fails.
#                                  With words after `run`: those whose line (`== ...`) has one of them; `run 'part 2'` is
#                                  one of five parts that take ten minutes at most on two GPUs, and `run mpirun` the rest
#   scripts/gpu-tests.sh           both, on a machine that has everything
#   scripts/gpu-tests.sh sanitize  there: NVIDIA's compute-sanitizer over every kernel of the collectives, at small sizes
#
# A test that finds no GPU says SKIPPED, and `run` fails then. What needs RDMA or a dmabuf beside it may be skipped.
set -eu -o pipefail
cd "$(dirname "$0")/.."
out=out/gpu
packages=(cuda-vec-add cuda-verbs allreduce-gpu ddp-gpu)
# To be run there by hand, or by scripts/nccl: measurements; libnccl.so, and what programs need to find it.
others=(-p perf -p tinynccl-nccl -p tinynccl-nccl-audit -p tinynccl-cli)

build() {
    rm -rf "$out" && mkdir -p "$out"
    local arguments=()
    for package in "${packages[@]}"; do arguments+=(-p "$package"); done
    # Cargo says where it put each executable: test programs by the name of their file, programs and libraries by their own.
    {
        cargo build --release --locked --message-format=json "${arguments[@]}" "${others[@]}"
        cargo test --release --locked --no-run --message-format=json "${arguments[@]}"
        cargo test --release --locked --no-run --message-format=json -p tinynccl --test cuda --test process_group
        cargo test --release --locked --no-run --message-format=json -p ddp-gpt --test main
        # What our stand-in for the driver promises must hold for the driver.
        cargo test --release --locked --no-run --message-format=json -p cuda-standin --test driver
    } |
        python3 -c '
import json, shutil, sys
for line in sys.stdin:
    message = json.loads(line)
    for file in message.get("filenames", []):
        if file.endswith(".so") and "nccl" in message["target"]["name"] and "/deps/" not in file:
            shutil.copy(file, sys.argv[1])
    if message.get("executable") and message.get("reason") == "compiler-artifact":
        package = message["manifest_path"].split("/")[-2]  # 03-cuda-vec-add, or lib
        package = package.lstrip("0123456789-")
        kind = message["target"]["name"] if message["profile"]["test"] else "program"
        name = message["target"]["name"] if kind == "program" else package + "." + kind + ".test"
        shutil.copy(message["executable"], sys.argv[1] + "/" + name)
' "$out"
    strip "$out"/*
    ls -l "$out"
}

# tests PROGRAM [FILTERS...]: a test that hangs ends after ten minutes.
tests() {
    local program=$1 name names failed=0
    shift
    if [[ $program != */cuda-standin.driver.test ]]; then
        timeout -k 10 600 "$program" --skip standin:: "$@"
        return
    fi
    # Each in a process of its own. In one process a stream may share a queue of the device with one that an earlier test
    # has left, or that waits on purpose, and then wait behind it for ever.
    names=$("$program" --list --skip standin:: "$@" | sed -n 's/: test$//p')
    for name in $names; do timeout -k 10 60 "$program" --exact "$name" || failed=1; done
    return $failed
}

run() {
    [[ -d $out ]] || { echo "nothing in $out: run scripts/gpu-tests.sh build where there is cargo, and copy it here" >&2; return 1; }
    local failed=() log
    # One test at a time: two communicators' kernels on the same GPUs may wait for each other for ever, as NCCL's.
    export RUST_TEST_THREADS=1
    export CUDA_VEC_ADD=$PWD/$out/cuda-vec-add CUDA_VERBS_PROGRAM=$PWD/$out/cuda-verbs
    export TINYNCCL_TEST_DRIVER=nvidia
    export ALLREDUCE_GPU=$PWD/$out/allreduce-gpu DDP_GPU=$PWD/$out/ddp-gpu DDP_GPT=$PWD/$out/ddp-gpt
    log=$(mktemp)
    # PART PATH HANDLES PROGRAM [ARGUMENTS]
    local tests=() cuda=$out/lib.cuda.test
    for test in "$out"/*.test; do
        case $test in
            # Of milestone 16 what runs on a GPU.
            */ddp-gpt.main.test) tests+=("1 auto auto $test gpu::") ;;
            */cuda-standin.driver.test) tests+=("1 auto auto $test captures:: contexts:: events:: memory:: streams::") ;;
            # By its modules, the others first: a new module is in part 2.
            "$cuda")
                tests+=("2 auto auto $test --skip peers:: --skip registered:: --skip schedules::"
                    "3 auto auto $test peers:: schedules::" "4 auto auto $test registered::") ;;
            *) tests+=("1 auto auto $test") ;;
        esac
    done
    # Once more through the hosts' memory, and with windows that are mapped by descriptors.
    tests+=("5 hosted auto $cuda peers:: messages:: faults::" "5 auto fd $out/allreduce-gpu.process.test"
        "5 auto fd $cuda registered::")
    for test in "${tests[@]}"; do
        local part path handles filters
        read -r part path handles test filters <<<"$test"
        read -ra filters <<<"$filters"
        local what="part $part: ${test##*/} ${filters[*]} (path: $path, handles: $handles)" word chosen=$((!$#))
        for word in "$@"; do [[ $what != *"$word"* ]] || chosen=1; done
        ((chosen)) || continue
        echo "== $what, $SECONDS s after the begin"
        TINYNCCL_CUDA_PATH=$path TINYNCCL_CUDA_HANDLES=$handles tests "$test" ${filters[@]+"${filters[@]}"} 2>&1 | tee "$log" ||
            failed+=("$what")
        if grep -Eq '^SKIPPED.*(GPU|libcuda|libnvrtc)' "$log"; then failed+=("$what, skipped"); fi
        # A filter that fits nothing is a mistake.
        if ((${#filters[@]})) && grep -q '^test result: ok. 0 passed' "$log"; then failed+=("$what, no test ran"); fi
    done
    # 09 and 14 as ranks that somebody else started.
    if (($#)) && [[ " $* " != *" mpirun "* ]]; then
        :
    elif command -v mpirun > /dev/null; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
        local program
        for program in "allreduce-gpu --bytes 8,1K,1M" "ddp-gpu --epochs 12"; do
            echo "== mpirun -n 2 $program, $SECONDS s after the begin"
            # shellcheck disable=SC2086 # a program and its arguments
            timeout 120 mpirun -n 2 "$out"/$program || failed+=("mpirun -n 2 $program")
        done
    else
        echo "SKIPPED: 09 and 14 under mpirun, which is not here (scripts/setup.sh --mpi)"
    fi
    rm -f "$log"
    if ((${#failed[@]})); then
        echo "FAILED: ${failed[*]}"
        return 1
    fi
    echo "all passed, in $SECONDS s"
}

# Every kernel, by ranks of one process on one GPU and on two, and in phases by two processes on one.
sanitize() {
    local tool test failed=() log
    if ! command -v compute-sanitizer > /dev/null; then
        echo "SKIPPED: compute-sanitizer is not here; it comes with the CUDA toolkit" >&2
        return 1
    fi
    log=$(mktemp)
    # A tool that finds nothing where there is something would find nothing anywhere.
    compute-sanitizer "$out/cuda-vec-add" fault address > "$log" 2>&1 || true
    if ! grep -q 'Invalid __global__' "$log"; then
        cat "$log"
        failed+=("memcheck does not see a wrong address")
    fi
    export RUST_TEST_THREADS=1
    for tool in memcheck racecheck synccheck; do
        for test in faults::kernels::every_kernel_on_one_gpu faults::kernels::every_kernel_on_two_gpus \
            faults::processes::every_kernel_of_processes_that_share_a_gpu \
            fused::groups_are_what_their_calls_are_one_by_one; do
            echo "== $tool: $test"
            compute-sanitizer --tool $tool --target-processes all --error-exitcode 1 \
                "$out/lib.cuda.test" --exact $test 2>&1 | tee "$log" || failed+=("$tool: $test")
            if grep -q '^SKIPPED' "$log" || ! grep -q '1 passed' "$log"; then failed+=("$tool: $test (not run)"); fi
        done
    done
    rm -f "$log"
    if ((${#failed[@]})); then
        printf 'FAILED: %s\n' "${failed[@]}"
        return 1
    fi
    echo "all clean"
}

case ${1-} in
    build) build ;;
    run) shift && run "$@" ;;
    sanitize) sanitize ;;
    '') build; run ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

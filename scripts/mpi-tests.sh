#!/usr/bin/env bash
# Ranks started by mpirun:
#
#   scripts/mpi-tests.sh
#   scripts/mpi-tests.sh ranks N      milestone 10 alone: every collective once on N ranks; 64 on two cores take a minute or two
#
# 1. Backend `mpi` of process groups (cargo feature `mpi`): the conformance suite of lib/tests/process_group on 2, 3 and 4 ranks,
#    which also compares every collective, type and operator of ours with MPI's own result.
# 2. Every milestone from 06 on that runs here, with our rendezvous found through mpirun's environment. Of milestone 10 a row per
#    primitive, and per collective by ring and by tree, on 2 and 3 ranks, and every collective once on 16. 11 and 12 where Python
#    has numpy and torch. RDMA under mpirun is scripts/verbs-tests.sh's, GPUs are scripts/gpu-tests.sh's; here 08, 09 and 14 say
#    what is missing.
#
# Installs Open MPI, its headers and libclang through apt-get if they are missing (as root). Exit code: 0 all passed, 1 something
# failed, 77 MPI is not here and could not be installed.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 1
many=0
case "$*" in
"") ;;
"ranks "[1-9]*) many=$2 ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

say() { printf '%s\n' "mpi-tests: $*" >&2; }

scripts/setup.sh --mpi || exit 77
# In the environment, so that mpirun itself goes without options, whichever it is: Open MPI 4 and 5 read these, MPICH none.
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
say "more ranks than cores are allowed (--oversubscribe of Open MPI, by its variables)"
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    say "as root, which Open MPI's mpirun must be told to allow (--allow-run-as-root, by its variables)"
fi

failed=()
run() {
    local name=$1 start=$SECONDS log status
    shift
    log=$(mktemp)
    "$@" >"$log" 2>&1
    status=$?
    if [ $status = 0 ]; then
        say "$name: ok, $((SECONDS - start)) s"
    else
        say "$name: FAILED, exit code $status, $((SECONDS - start)) s; its last lines:"
        tail -n 30 "$log" >&2
        failed+=("$name")
    fi
    rm -f "$log"
}

# With --workspace throughout, so that cargo takes every dependency with the features that it has in a build of everything: what
# .ci/run builds before or after this is then used here, and only what knows the feature is built for it.
bin=$PWD/${CARGO_TARGET_DIR:-target}/debug
[[ ${CARGO_TARGET_DIR-} = /* ]] && bin=$CARGO_TARGET_DIR/debug
out=$(mktemp -d) || exit 1
trap 'rm -rf "$out"' EXIT

# once N: every collective once, with many more ranks than cores.
once() { (cd "$out" && timeout 600 mpirun -n "$1" "$bin/stress" -b 1K -e 1K -n 1 -w 0 --repetitions 1 --collective all); }
if ((many)); then
    run "stress" cargo build --locked -p stress
    run "10 every collective once, $many ranks" once "$many"
    exit $((${#failed[@]} > 0))
fi

run "clippy with mpi" cargo clippy --locked --workspace --features tinynccl/mpi --test process_group -- -D warnings
run "backend mpi" cargo test --locked --workspace --features tinynccl/mpi --test process_group -- mpi

# Data parallelism with MPI as the carrier. Kept apart: the build without the feature below replaces the program.
with_mpi() {
    cargo build --locked --workspace --features ddp-train/mpi --bin ddp-train && cp "$bin/ddp-train" "$out/ddp-train-mpi" || return 1
    timeout 120 mpirun -n 2 "$out/ddp-train-mpi" --backend mpi --epochs 12 --bucket-bytes 1
}
run "13 ddp-train by backend mpi, 2 ranks" with_mpi

run "programs" cargo build --locked --workspace --bins
for _ in {1..200}; do echo "to be or not to sum, that is the all-reduction"; done >"$out/text.txt"

# ranks N PROGRAM [ARGUMENT...]
ranks() { (cd "$out" && timeout 120 mpirun -n "$1" "$bin/$2" "${@:3}"); }

# The same, of a program that must say that something is missing here, and fail.
missing() {
    local words=$1 text
    shift
    if text=$(ranks "$@" 2>&1); then
        printf '%s\n' "$text"
        return 0
    fi
    printf '%s\n' "$text"
    grep -q "$words" <<<"$text" && say "${*:2}: says '$words', as it should without it"
}

for n in 2 3 4; do run "06 lib-hello, $n ranks" ranks $n lib-hello; done
run "07 allreduce-tcp, 3 ranks" ranks 3 allreduce-tcp --bytes 1K,1M --iters 5
run "08 allreduce-verbs, 2 ranks" ranks 2 allreduce-verbs --bytes 1K --iters 2
run "09 allreduce-gpu, 2 ranks" missing "not available here" 2 allreduce-gpu --bytes 8,1K

# stress N ARGUMENTS...: every element checked, few calls, out of place and in place, ordinary buffers.
stress() { ranks "$1" stress -b 8 -e 1M -f 32 -n 2 -w 1 --repetitions 1 "${@:2}"; }
by_algorithm() { TINYNCCL_ALGO=$2 stress "$1" --collective "$3"; }
for n in 2 3; do
    for what in sendrecv pingpong neighbours gather scatter all_to_all; do
        run "10 $what, $n ranks" stress $n --collective $what
    done
    for algorithm in ring tree; do
        for what in all_reduce all_gather reduce_scatter broadcast reduce barrier; do
            run "10 $what by $algorithm, $n ranks" by_algorithm $n $algorithm $what
        done
    done
    run "10 groups, $n ranks" stress $n --group --collective all,pingpong,neighbours
    run "10 parts of a split, $n ranks" stress $n --split 2 --collective all,neighbours
    run "10 all over TCP, $n ranks" stress $n --transport tcp --collective all,pingpong,neighbours
done
run "10 every collective once, 16 ranks" once 16

# Python ranks: mpirun starts the programs, and each becomes the interpreter of its rank.
if scripts/setup.sh --python; then
    # Not built by every rank: they would wait for each other.
    extension() {
        cargo build --locked -p tinynccl-python && mkdir -p "$out/python" &&
            cp -r bindings/python/python/tinynccl "$out/python" &&
            cp "$bin/libtinynccl_python.so" "$out/python/tinynccl/_core.abi3.so"
    }
    # torch's own store: a file needs no free port.
    ddp() { OMP_NUM_THREADS=1 INIT_METHOD=file://$out/store-$1 ranks "$1" pytorch-ddp --module "$out/python" -- --epochs 12; }
    run "extension" extension
    for n in 2 3; do
        run "11 pytorch-bindings, $n ranks" ranks $n pytorch-bindings --module "$out/python"
        run "12 pytorch-ddp, $n ranks" ddp $n
    done
else
    say "11 and 12: SKIPPED: Debian's torch is not here and could not be installed"
fi
run "13 ddp-train, 3 ranks" ranks 3 ddp-train --epochs 12
run "14 ddp-gpu, 2 ranks" missing "not available here" 2 ddp-gpu
run "15 ddp-sine, 4 ranks" ranks 4 ddp-sine
run "16 ddp-gpt, 2 ranks" ranks 2 ddp-gpt --preset tiny --data text.txt --steps 6 --threads 1 --sample-chars 10 --out gpt

if ((${#failed[@]})); then
    say "FAILED: ${failed[*]}"
    exit 1
fi
say "all passed"

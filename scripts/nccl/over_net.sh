#!/usr/bin/env bash
# Sourced by nccl-net.sh and roce-nccl.sh: nccl-tests in two processes with a GPU each. Peer access and shared memory are
# forbidden, so that every byte crosses the network. They set name, here, folder, nccl and out.

missing() { echo "$name: cannot run here: $*" >&2; exit 77; }

# need PROGRAMS: two GPUs, NCCL, and of nccl-tests all_reduce and these, comma-separated.
need() {
    local gpus program command
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
    ((gpus >= 2)) || missing "$gpus NVIDIA GPUs, and it takes 2"
    for program in all_reduce ${1//,/ }; do
        [[ -x $folder/${program}_perf ]] || missing "no ${program}_perf in $folder: build nccl-tests there with make MPI=1"
    done
    [[ -f $nccl ]] || missing "no NCCL at $nccl"
    for command in mpirun python3; do command -v $command >/dev/null || missing "no $command (scripts/setup.sh --mpi)"; done
}

# Makes the folder of the results, with tables without rows.
begin_tables() {
    mkdir -p "$out/lib" || exit 1
    echo "library,program,case,mode,status,seconds,rows,wrong" > "$out/runs.csv"
    echo "library,program,case,mode,bytes,type,op,root,out_us,in_us,wrong" > "$out/times.csv"
}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

# With a number in cores, each rank has so many of its own.
on_cores='[[ -z $CORES ]] || exec taskset -c $((first = OMPI_COMM_WORLD_LOCAL_RANK * CORES))-$((first + CORES - 1)) "$@"; exec "$@"'

# over_net WAY PROGRAM CASE OPTIONS...: runs the program, its ranks with the settings in the array `with`, and adds its rows to
# the tables. Sets log. Exit code 1 if the run failed or had wrong values.
over_net() {
    local way=$1 program=$2 case=$3 begin=$EPOCHREALTIME status=0
    shift 3
    log=$out/$way.$program.$case.log
    # For the ranks alone, not for mpirun.
    timeout -k 5 90 mpirun -n 2 --bind-to none env "CORES=${cores-}" bash -c "$on_cores" rank env "LD_PRELOAD=$nccl" \
        NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET "${with[@]}" \
        "$folder/${program}_perf" "$@" -c 1 >"$log" 2>&1 </dev/null || status=$?
    python3 "$here/nccl/nccl_tests_rows.py" "$log" "$out" "$way" "$program" "$case" two "$status" \
        "$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")"
}

#!/usr/bin/env bash
# nccl-tests, all its programs, over several libraries in turn, on a machine with two GPUs or more:
#
#   scripts/nccl/nccl-tests.sh [-c CASES] [-p PROGRAMS] [-m MODES] [-l SECONDS] FOLDER OUT NAME=LIBRARY...
#   scripts/nccl/nccl-tests.sh -c check build out/nccl-tests nvidia=.../libnccl.so.2 tinynccl=$PWD/libnccl.so
#
# FOLDER holds the programs (make MPI=1 NVCC_GENCODE=-gencode=arch=compute_90,code=sm_90). OUT gets a log per run,
# runs.csv (wrong values and exit status of each run) and times.csv (each size). Each LIBRARY is preloaded.
#   -c  cases by name, or check (default), speed, all; comma-separated
#   -p  programs by their names without _perf; default all that FOLDER has
#   -m  one: a process with -g 2 (default with two); two: two processes with a GPU each, by mpirun; threads: -t 2
#   -l  limit of each run in seconds, default 120
# Exit status 1 if a run failed, had wrong values or printed no size.
set -eu -o pipefail

# Name, set, modes, options. Sizes are bytes. Types and operators are all only where that is the point.
cases() {
    cat <<'END'
types          check one,two,threads  -d all -o all -b 8 -e 2M -f 64 -n 2 -w 1 -c 1
odd            check one,two          -d bfloat16 -b 1 -e 300007 -i 27271 -n 2 -w 1 -c 1
odd_large      check two              -d float -b 33333333 -e 99999999 -i 33333333 -n 2 -w 1 -c 1
unaligned      check two              -d half -u 1 -b 1022 -e 1000000 -f 31 -n 2 -w 1 -c 1
roots          check one,two          -r all -b 4K -e 1M -f 16 -n 2 -w 1 -c 1
graph_check    check one,two          -G 3 -o all -b 8 -e 16M -f 128 -n 4 -w 1 -c 1
register_check check one,two          -R 1 -b 8 -e 16M -f 128 -n 4 -w 1 -c 1
window_check   check one,two          -R 2 -o all -b 8 -e 16M -f 128 -n 4 -w 1 -c 1
window_graph   check two              -R 2 -G 3 -b 8 -e 16M -f 128 -n 4 -w 1 -c 1
blocking       check one,two          -z 1 -b 8 -e 16M -f 128 -n 4 -w 1 -c 1
together       check one,two          -m 8 -b 8 -e 1M -f 32 -n 4 -w 1 -c 1
many           check two              -b 8 -e 512 -f 64 -n 20000 -w 1 -c 1
split          check two              -b 8 -e 1M -f 32 -n 4 -w 1 -c 1
plain          speed two              -b 8 -e 1G -f 4 -n 20 -w 5 -c 1
plain_graph    speed two              -b 8 -e 1G -f 4 -n 20 -w 5 -G 5 -c 1
window         speed two              -b 8 -e 1G -f 4 -n 20 -w 5 -R 2 -c 1
window_graphs  speed two              -b 8 -e 1G -f 4 -n 20 -w 5 -R 2 -G 5 -c 1
one_process    speed one              -b 8 -e 1G -f 8 -n 20 -w 5 -c 1
END
}

usage() { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
chosen=check programs='' modes='' limit=120
while getopts c:p:m:l: option; do
    case $option in
        c) chosen=$OPTARG ;; p) programs=${OPTARG//,/ } ;; m) modes=$OPTARG ;; l) limit=$OPTARG ;; *) usage ;;
    esac
done
shift $((OPTIND - 1))
(($# >= 3)) || usage
folder=$1 out=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
in_list() { [[ ,$2, = *,$1,* ]]; }

if [[ -z $programs ]]; then
    for path in "$folder"/*_perf; do
        [[ -x $path ]] && programs+="$(basename "$path" _perf) "
    done
fi
[[ -n $programs ]] || { echo "no program NAME_perf in $folder: build nccl-tests with MPI=1" >&2; exit 2; }
for pair in "$@"; do
    [[ $pair = *=* && -f ${pair#*=} ]] || { echo "$pair: expected NAME=LIBRARY with a file" >&2; exit 2; }
done
mkdir -p "$out"
echo "library,program,case,mode,status,seconds,rows,wrong" > "$out/runs.csv"
echo "library,program,case,mode,bytes,type,op,root,out_us,in_us,wrong" > "$out/times.csv"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

# The preloaded library must be the only one that a program gets: another is listed as "libnccl.so.2 => ...".
for pair in "$@"; do
    for program in $programs; do
        listed=$(env LD_PRELOAD="${pair#*=}" LD_TRACE_LOADED_OBJECTS=1 "$folder/${program}_perf")
        if [[ $listed != *"${pair#*=} ("* || $listed = *"libnccl.so.2 =>"* ]]; then
            echo "FAILED ${pair%%=*}: ${program}_perf would not load ${pair#*=} (or not it alone):"
            grep nccl <<< "$listed" || true
            exit 1
        fi
    done
done

one_run() { # NAME LIBRARY PROGRAM CASE MODE OPTIONS...
    local name=$1 library=$2 program=$3 case=$4 mode=$5 begin=$EPOCHREALTIME status=0
    shift 5
    local log=$out/$name.$program.$case.$mode.log command=("$folder/${program}_perf" "$@")
    case $mode in
        one) command+=(-t 1 -g 2) ;;
        threads) command+=(-t 2 -g 1) ;;
        two) command+=(-t 1 -g 1) ;;
    esac
    local with=(env "LD_PRELOAD=$library")
    [[ $case = split ]] && with+=("NCCL_TESTS_SPLIT=MOD 2")
    command=("${with[@]}" "${command[@]}")
    # Into the ranks alone, not into mpirun.
    [[ $mode = two ]] && command=(mpirun -n 2 --bind-to none "${command[@]}")
    timeout -k 10 "$limit" "${command[@]}" > "$log" 2>&1 < /dev/null || status=$?
    python3 "$here/nccl_tests_rows.py" "$log" "$out" "$name" "$program" "$case" "$mode" "$status" \
        "$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")"
}

failed=0
while read -r case set case_modes options; do
    in_list "$case" "$chosen" || in_list "$set" "$chosen" || in_list all "$chosen" || continue
    for program in $programs; do
        for mode in ${case_modes//,/ }; do
            [[ -z $modes ]] || in_list "$mode" "$modes" || continue
            for pair in "$@"; do
                # shellcheck disable=SC2086 # options are words
                one_run "${pair%%=*}" "${pair#*=}" "$program" "$case" "$mode" $options || failed=$((failed + 1))
            done
        done
    done
done < <(cases)
python3 "$here/nccl_tests_rows.py" table "$out"
if ((failed)); then echo "FAILED: $failed runs"; exit 1; fi

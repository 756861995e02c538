#!/usr/bin/env bash
# NVIDIA's NCCL over our network plugin (docs/nccl-net.md), over its own sockets as they are, and over its own sockets with
# several threads, in turn on a machine with two GPUs. Runs nccl-tests unmodified, two processes with a GPU each; peer access and
# shared memory are forbidden, so that every byte crosses the network.
#
#   scripts/nccl-net.sh [-i INTERFACE] [-r ROUNDS] [-l PLUGIN] [-p PROGRAMS] [-b THREADS:SOCKETS] [-v NAME:SETTING,...]
#                       [-s SIZES] FOLDER NCCL OUT
#   scripts/nccl-net.sh nccl-tests/build .../libnccl.so.2 out/nccl-net
#
# FOLDER holds nccl-tests' programs (make MPI=1), NCCL is NVIDIA's library. OUT gets a log per run, runs.csv and times.csv.
#   -i  interface, for all; default: as each of them chooses
#   -r  rounds of all_reduce, default 3; the other programs run once
#   -l  the plugin, default target/release/libnccl_net_tinynccl.so (cargo build --release -p tinynccl-nccl-net)
#   -p  the other programs, comma-separated, default broadcast,all_gather,reduce_scatter,sendrecv,alltoall; none: -
#   -b  NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD of NCCL's sockets with threads, default 4:4
#   -v  one more way, with the plugin and settings: -v two:TINYNCCL_NET_STREAMS=2; may be given again
#   -s  smallest and largest message and the factor between, default 8:128M:2
# Prints NCCL's lines that name the plugin, and medians with ratios. Exit code: 0; 1 if a run failed, had wrong values or did not
# go the way it should; 77 where something that it needs is not here.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
interface='' rounds=3 plugin=$here/../target/release/libnccl_net_tinynccl.so best=4:4 sizes=8:128M:2
programs=broadcast,all_gather,reduce_scatter,sendrecv,alltoall
ways=(Socket SocketThreads tinynccl) more=()
usage() { sed -n '2,21s/^# \{0,1\}//p' "$0" >&2; exit 2; }
while getopts i:r:l:p:b:v:s: option; do
    case $option in
        i) interface=$OPTARG ;; r) rounds=$OPTARG ;; l) plugin=$OPTARG ;; p) programs=${OPTARG#-} ;; b) best=$OPTARG ;;
        v) ways+=("${OPTARG%%:*}") more+=("$OPTARG") ;; s) sizes=$OPTARG ;; *) usage ;;
    esac
done
shift $((OPTIND - 1))
(($# == 3)) || usage
folder=$1 nccl=$2 out=$3

missing() { echo "nccl-net: cannot run here: $*" >&2; exit 77; }
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
((gpus >= 2)) || missing "$gpus NVIDIA GPUs, and it takes 2"
for program in all_reduce ${programs//,/ }; do
    [[ -x $folder/${program}_perf ]] || missing "no ${program}_perf in $folder: build nccl-tests there with make MPI=1"
done
[[ -f $nccl ]] || missing "no NCCL at $nccl"
[[ -f $plugin ]] || missing "no plugin at $plugin: cargo build --release -p tinynccl-nccl-net"
for command in mpirun python3; do command -v $command >/dev/null || missing "no $command (scripts/setup.sh --mpi)"; done
mkdir -p "$out/lib" || exit 1
ln -sf "$(realpath "$plugin")" "$out/lib/libnccl-net-tinynccl.so"
echo "library,program,case,mode,status,seconds,rows,wrong" > "$out/runs.csv"
echo "library,program,case,mode,bytes,type,op,root,out_us,in_us,wrong" > "$out/times.csv"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
failed=0
# one_run WAY PROGRAM CASE OPTIONS...
one_run() {
    local way=$1 program=$2 case=$3 begin=$EPOCHREALTIME status=0 line
    shift 3
    local log=$out/$way.$program.$case.log
    # For the ranks alone, not for mpirun.
    local with=(env "LD_PRELOAD=$nccl" NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET)
    [[ -n $interface ]] && with+=("NCCL_SOCKET_IFNAME=$interface" "TINYNCCL_IFNAME=$interface")
    case $way in
        Socket) with+=(NCCL_NET=Socket NCCL_NET_PLUGIN=none) line='via NET/Socket/' ;;
        SocketThreads)
            with+=(NCCL_NET=Socket NCCL_NET_PLUGIN=none "NCCL_SOCKET_NTHREADS=${best%:*}" "NCCL_NSOCKS_PERTHREAD=${best#*:}")
            line='via NET/Socket/'
            ;;
        *)
            with+=(NCCL_NET_PLUGIN=tinynccl "LD_LIBRARY_PATH=$(realpath "$out")/lib:${LD_LIBRARY_PATH-}") line='via NET/tinynccl/'
            local named
            for named in "${more[@]}"; do
                [[ ${named%%:*} = "$way" ]] && IFS=, read -ra settings <<<"${named#*:}" && with+=("${settings[@]}")
            done
            ;;
    esac
    timeout -k 5 90 mpirun -n 2 --bind-to none "${with[@]}" "$folder/${program}_perf" "$@" -c 1 >"$log" 2>&1 </dev/null || status=$?
    python3 "$here/nccl/nccl_tests_rows.py" "$log" "$out" "$way" "$program" "$case" two "$status" \
        "$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")" || failed=1
    grep -q "$line" "$log" || { echo "FAILED $way $program $case: NCCL does not say \"$line\"" && failed=1; }
}

IFS=: read -r smallest largest factor <<<"$sizes"
for ((round = 1; round <= rounds; round++)); do
    # Each is first in turn.
    for ((i = 0; i < ${#ways[@]}; i++)); do
        one_run "${ways[(i + round - 1) % ${#ways[@]}]}" all_reduce "round$round" -b "$smallest" -e "$largest" -f "$factor" -n 20 -w 5
    done
done
for program in ${programs//,/ }; do
    for way in "${ways[@]}"; do one_run "$way" "$program" once -b 1K -e 64M -f 4 -n 20 -w 5; done
done
echo
grep -h "NET/tinynccl\|NET plugin\|network plugin" "$out/tinynccl.all_reduce.round1.log" | sed 's/^.*NCCL INFO //' | sort | uniq -c | head -20
for way in "${ways[@]}"; do
    [[ $way = tinynccl ]] && continue
    echo
    python3 "$here/nccl/nccl_tests_rows.py" medians "$out" "$way" tinynccl
done
((failed == 0)) || { echo "FAILED: see above and $out" && exit 1; }

#!/usr/bin/env bash
# NVIDIA's NCCL over our network plugin (docs/nccl-net.md), over its own sockets as they are, and over its own sockets
# with several threads, in turn on a machine with two GPUs. Runs nccl-tests unmodified, two processes with a GPU each;
# peer access and shared memory are forbidden, so that every byte crosses the network.
#
#   scripts/nccl-net.sh [-i INTERFACE] [-r ROUNDS] [-l PLUGIN] [-p PROGRAMS] [-b THREADS:SOCKETS] [-v NAME:SETTING,...]
#                       [-s SIZES] [-c CORES] [-m] FOLDER NCCL OUT
#   scripts/nccl-net.sh nccl-tests/build .../libnccl.so.2 out/nccl-net
#
# FOLDER holds nccl-tests' programs (make MPI=1), NCCL is NVIDIA's library. OUT gets a log per run, runs.csv and
# times.csv.
#   -i  interface, for all; default: as each of them chooses
#   -r  rounds, default 3
#   -l  the plugin, default target/release/libnccl_net_tinynccl.so (cargo build --release -p tinynccl-nccl-net)
#   -p  the other programs, comma-separated, default broadcast,all_gather,reduce_scatter,sendrecv,alltoall; none: -
#   -b  NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD of NCCL's sockets with threads, default 4:4
#   -v  one more way, with the plugin and settings: -v two:TINYNCCL_NET_STREAMS=2; may be given again
#   -s  smallest and largest message of all_reduce and the factor between, default 8:128M:2; the other programs have
#       1K to 64M
#   -c  cores that each process may use, default all
#   -m  over NCCL's shared memory, too: what NCCL and the GPUs take where there is no network
# Prints NCCL's lines that name the plugin, and medians with ratios. Exit code: 0; 1 if a run failed, had wrong values or
# did not go the way it should; 77 where something that it needs is not here.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
interface='' cores='' rounds=3 plugin=$here/../target/release/libnccl_net_tinynccl.so best=4:4 sizes=8:128M:2
programs=broadcast,all_gather,reduce_scatter,sendrecv,alltoall
ways=(Socket SocketThreads tinynccl) more=()
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0" >&2; exit 2; }
while getopts i:r:l:p:b:v:s:c:m option; do
    case $option in
        i) interface=$OPTARG ;; r) rounds=$OPTARG ;; l) plugin=$OPTARG ;; p) programs=${OPTARG#-} ;; b) best=$OPTARG ;;
        v) ways+=("${OPTARG%%:*}") more+=("$OPTARG") ;; s) sizes=$OPTARG ;; c) cores=$OPTARG ;; m) ways+=(SharedMemory) ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
(($# == 3)) || usage
folder=$1 nccl=$2 out=$3

name=nccl-net
. "$here/nccl/over_net.sh"
need "$programs"
[[ -f $plugin ]] || missing "no plugin at $plugin: cargo build --release -p tinynccl-nccl-net"
begin_tables
ln -sf "$(realpath "$plugin")" "$out/lib/libnccl-net-tinynccl.so"

failed=0
# one_run WAY PROGRAM CASE OPTIONS...
one_run() {
    local way=$1 line log with=()
    [[ -n $interface ]] && with+=("NCCL_SOCKET_IFNAME=$interface" "TINYNCCL_IFNAME=$interface")
    case $way in
        Socket) with+=(NCCL_NET=Socket NCCL_NET_PLUGIN=none) line='via NET/Socket/' ;;
        SocketThreads)
            with+=(NCCL_NET=Socket NCCL_NET_PLUGIN=none "NCCL_SOCKET_NTHREADS=${best%:*}" "NCCL_NSOCKS_PERTHREAD=${best#*:}")
            line='via NET/Socket/'
            ;;
        SharedMemory) with+=(NCCL_SHM_DISABLE=0 NCCL_NET_PLUGIN=none) line='via SHM/' ;;
        *)
            with+=(NCCL_NET_PLUGIN=tinynccl "LD_LIBRARY_PATH=$(realpath "$out")/lib:${LD_LIBRARY_PATH-}") line='via NET/tinynccl/'
            local named
            for named in "${more[@]}"; do
                [[ ${named%%:*} = "$way" ]] && IFS=, read -ra settings <<<"${named#*:}" && with+=("${settings[@]}")
            done
            ;;
    esac
    over_net "$@" || failed=1
    grep -q "$line" "$log" || { echo "FAILED $1 $2 $3: NCCL does not say \"$line\"" && failed=1; }
}

IFS=: read -r smallest largest factor <<<"$sizes"
for program in all_reduce ${programs//,/ }; do
    for ((round = 1; round <= rounds; round++)); do
        # Each is first in turn.
        for ((i = 0; i < ${#ways[@]}; i++)); do
            one_run "${ways[(i + round - 1) % ${#ways[@]}]}" "$program" "round$round" -b "$smallest" -e "$largest" -f "$factor" -n 20 -w 5
        done
    done
    smallest=1K largest=64M factor=4
done
echo
grep -h "NET/tinynccl\|NET plugin\|network plugin" "$out/tinynccl.all_reduce.round1.log" | sed 's/^.*NCCL INFO //' | sort | uniq -c | head -20
for way in "${ways[@]}"; do
    [[ $way = tinynccl ]] && continue
    echo
    python3 "$here/nccl/nccl_tests_rows.py" medians "$out" "$way" tinynccl
done
((failed == 0)) || { echo "FAILED: see above and $out" && exit 1; }

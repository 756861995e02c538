#!/usr/bin/env bash
# NVIDIA's NCCL with its own transport for InfiniBand (NET/IB) over our card in user space, and over its own sockets, in turn on
# one interface of a machine with two GPUs. Runs nccl-tests unmodified, two processes with a GPU each; peer access and shared
# memory are forbidden, so that every byte crosses the interface.
#
#   scripts/roce-nccl.sh [-g] [-i INTERFACE] [-r ROUNDS] [-c CARD] [-p PROGRAMS] FOLDER NCCL OUT
#   scripts/roce-nccl.sh nccl-tests/build .../libnccl.so.2 out/roce-nccl
#
# FOLDER holds nccl-tests' programs (make MPI=1), NCCL is NVIDIA's library. OUT gets a log per run, runs.csv and times.csv.
#   -g  also with GPUDirect: the card gets the GPUs' memory as a dma-buf, which CUDA's driver copies for it
#   -i  interface, default lo
#   -r  rounds of all_reduce, 8 B to 128 MiB, default 3; the other programs run once
#   -c  our libibverbs, default target/release/libibverbs_roce.so (cargo build --release -p tinynccl-ibverbs)
#   -p  the other programs, comma-separated, default broadcast,all_gather,reduce_scatter,sendrecv,alltoall; none: -
# Prints NCCL's lines that name the card, and the medians of both with their ratio. Exit code: 0; 1 if a run failed, had wrong
# values or did not go the way it should; 77 where something that it needs is not here.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
interface=lo rounds=3 ways=(Socket IB) card=$here/../target/release/libibverbs_roce.so
programs=broadcast,all_gather,reduce_scatter,sendrecv,alltoall
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0" >&2; exit 2; }
while getopts gi:r:c:p: option; do
    case $option in
        g) ways+=(GDR) ;;
        i) interface=$OPTARG ;; r) rounds=$OPTARG ;; c) card=$OPTARG ;; p) programs=${OPTARG#-} ;; *) usage ;;
    esac
done
shift $((OPTIND - 1))
(($# == 3)) || usage
folder=$1 nccl=$2 out=$3

name=roce-nccl
. "$here/nccl/over_net.sh"
need "$programs"
[[ -f $card ]] || missing "no card at $card: cargo build --release -p tinynccl-ibverbs"
[[ -d /sys/class/net/$interface ]] || missing "no interface $interface"
begin_tables
# NCCL looks for the first name, other programs for the second.
for link in libibverbs.so libibverbs.so.1; do ln -sf "$(realpath "$card")" "$out/lib/$link"; done

# Where in the card's table of addresses the first IPv4 address is: NCCL looks for it in sysfs, which knows of no card here.
gid=$(TINYROCE_DEVICES=$interface python3 - "$out/lib/libibverbs.so.1" <<'PYTHON'
import ctypes, sys
verbs = ctypes.CDLL(sys.argv[1])
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_open_device.restype = ctypes.c_void_p
count = ctypes.c_int()
devices = verbs.ibv_get_device_list(ctypes.byref(count))
context = ctypes.c_void_p(verbs.ibv_open_device(ctypes.c_void_p(devices[0]))) if count.value else None
gid = (ctypes.c_ubyte * 16)()
for index in range(256 if context else 0):
    if verbs.ibv_query_gid(context, ctypes.c_uint8(1), index, gid) == 0 and bytes(gid)[:12] == bytes(10) + b"\xff\xff":
        print(index)
        break
PYTHON
)
[[ -n $gid ]] || missing "the card has no IPv4 address on $interface"

failed=0
# one_run IB|GDR|Socket PROGRAM CASE OPTIONS...
one_run() {
    local net=${1/GDR/IB} log with=("NCCL_SOCKET_IFNAME=$interface")
    with+=("NCCL_NET=$net")
    # An interface has no place on PCIe, so NCCL takes it for far away from every GPU.
    [[ $1 = GDR ]] && with+=(NCCL_NET_GDR_LEVEL=SYS NCCL_NET_GDR_READ=1)
    # GIN is NCCL's network for kernels, which takes a card of NVIDIA's.
    [[ $net = IB ]] && with+=("LD_LIBRARY_PATH=$(realpath "$out")/lib:${LD_LIBRARY_PATH-}" "TINYROCE_DEVICES=$interface"
        NCCL_IB_HCA=tinyroce0 "NCCL_IB_GID_INDEX=$gid" NCCL_GIN_TYPE=0)
    over_net "$@" || failed=1
    if ! grep -q "via NET/$net/" "$log" || { [[ $net = IB ]] && ! grep -q "NET/IB.*tinyroce0" "$log"; }; then
        echo "FAILED $1 $2 $3: NCCL does not say that it went over NET/$net"
        failed=1
    fi
    if [[ $1 = GDR ]] && ! grep -q "via NET/IB/.*GDRDMA" "$log"; then
        echo "FAILED $1 $2 $3: NCCL does not say that it gave the card the GPU's memory"
        failed=1
    fi
}

for ((round = 1; round <= rounds; round++)); do
    for net in $( ((round % 2)) && echo "${ways[@]}" || printf '%s\n' "${ways[@]}" | tac); do
        one_run "$net" all_reduce "round$round" -b 8 -e 128M -f 2 -n 20 -w 5
    done
done
for program in ${programs//,/ }; do
    for net in "${ways[@]}"; do one_run "$net" "$program" once -b 1K -e 64M -f 4 -n 20 -w 5; done
done
echo
for way in "${ways[@]:1}"; do grep -h "NET/IB : Using\|via NET/IB" "$out/$way.all_reduce.round1.log"; done
echo
for way in "${ways[@]:1}"; do python3 "$here/nccl/nccl_tests_rows.py" medians "$out" Socket "$way"; done
((failed == 0)) || { echo "FAILED: see above and $out" && exit 1; }

#!/usr/bin/env bash
# NVIDIA's NCCL with its own transport for InfiniBand (NET/IB) over our card in user space, and over its own sockets, in turn on
# one interface of a machine with two GPUs. Runs nccl-tests unmodified, two processes with a GPU each; peer access and shared
# memory are forbidden, so that every byte crosses the interface.
#
#   scripts/roce-nccl.sh [-i INTERFACE] [-r ROUNDS] [-c CARD] [-p PROGRAMS] FOLDER NCCL OUT
#   scripts/roce-nccl.sh nccl-tests/build .../libnccl.so.2 out/roce-nccl
#
# FOLDER holds nccl-tests' programs (make MPI=1), NCCL is NVIDIA's library. OUT gets a log per run, runs.csv and times.csv.
#   -i  interface, default lo
#   -r  rounds of all_reduce, 8 B to 128 MiB, default 3; the other programs run once
#   -c  our libibverbs, default target/release/libibverbs_roce.so (cargo build --release -p tinynccl-ibverbs)
#   -p  the other programs, comma-separated, default broadcast,all_gather,reduce_scatter,sendrecv,alltoall; none: -
# Prints NCCL's lines that name the card, and the medians of both with their ratio. Exit code: 0; 1 if a run failed, had wrong
# values or did not go the way it should; 77 where something that it needs is not here.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
interface=lo rounds=3 card=$here/../target/release/libibverbs_roce.so
programs=broadcast,all_gather,reduce_scatter,sendrecv,alltoall
usage() { sed -n '2,17s/^# \{0,1\}//p' "$0" >&2; exit 2; }
while getopts i:r:c:p: option; do
    case $option in
        i) interface=$OPTARG ;; r) rounds=$OPTARG ;; c) card=$OPTARG ;; p) programs=${OPTARG#-} ;; *) usage ;;
    esac
done
shift $((OPTIND - 1))
(($# == 3)) || usage
folder=$1 nccl=$2 out=$3

missing() { echo "roce-nccl: cannot run here: $*" >&2; exit 77; }
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
((gpus >= 2)) || missing "$gpus NVIDIA GPUs, and it takes 2"
for program in all_reduce ${programs//,/ }; do
    [[ -x $folder/${program}_perf ]] || missing "no ${program}_perf in $folder: build nccl-tests there with make MPI=1"
done
[[ -f $nccl ]] || missing "no NCCL at $nccl"
[[ -f $card ]] || missing "no card at $card: cargo build --release -p tinynccl-ibverbs"
for command in mpirun python3; do command -v $command >/dev/null || missing "no $command (scripts/setup.sh --mpi)"; done
[[ -d /sys/class/net/$interface ]] || missing "no interface $interface"
mkdir -p "$out/lib" || exit 1
# NCCL looks for the first name, other programs for the second.
for name in libibverbs.so libibverbs.so.1; do ln -sf "$(realpath "$card")" "$out/lib/$name"; done
echo "library,program,case,mode,status,seconds,rows,wrong" > "$out/runs.csv"
echo "library,program,case,mode,bytes,type,op,root,out_us,in_us,wrong" > "$out/times.csv"

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

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
failed=0
# one_run IB|Socket PROGRAM CASE OPTIONS...
one_run() {
    local net=$1 program=$2 case=$3 begin=$EPOCHREALTIME status=0
    shift 3
    local log=$out/$net.$program.$case.log
    # For the ranks alone, not for mpirun.
    local with=(env "LD_PRELOAD=$nccl" "NCCL_NET=$net" NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 "NCCL_SOCKET_IFNAME=$interface"
        NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET)
    # GIN is NCCL's network for kernels, which takes a card of NVIDIA's.
    [[ $net = IB ]] && with+=("LD_LIBRARY_PATH=$(realpath "$out")/lib:${LD_LIBRARY_PATH-}" "TINYROCE_DEVICES=$interface"
        NCCL_IB_HCA=tinyroce0 "NCCL_IB_GID_INDEX=$gid" NCCL_GIN_TYPE=0)
    timeout -k 5 90 mpirun -n 2 --bind-to none "${with[@]}" "$folder/${program}_perf" "$@" -c 1 >"$log" 2>&1 </dev/null || status=$?
    python3 "$here/nccl/nccl_tests_rows.py" "$log" "$out" "$net" "$program" "$case" two "$status" \
        "$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")" || failed=1
    if ! grep -q "via NET/$net/" "$log" || { [[ $net = IB ]] && ! grep -q "NET/IB.*tinyroce0" "$log"; }; then
        echo "FAILED $net $program $case: NCCL does not say that it went over NET/$net"
        failed=1
    fi
}

for ((round = 1; round <= rounds; round++)); do
    for net in $( ((round % 2)) && echo Socket IB || echo IB Socket); do
        one_run "$net" all_reduce "round$round" -b 8 -e 128M -f 2 -n 20 -w 5
    done
done
for program in ${programs//,/ }; do
    for net in Socket IB; do one_run "$net" "$program" once -b 1K -e 64M -f 4 -n 20 -w 5; done
done
echo
grep -h "NET/IB : Using\|via NET/IB" "$out/IB.all_reduce.round1.log"
echo
python3 "$here/nccl/nccl_tests_rows.py" medians "$out" Socket IB
((failed == 0)) || { echo "FAILED: see above and $out" && exit 1; }

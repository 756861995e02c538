#!/usr/bin/env bash
# Unmodified RDMA programs over our RoCEv2 card (lib/softroce, through bindings/ibverbs), on the loopback interface.
#
#   scripts/roce-programs.sh [PATTERN...]      default: all; a pattern picks rows by their name, as `case` does
#
# Runs each program that is installed, with our libibverbs.so.1 in front of the system's, and says in one line what became
# of it: ok and the last line that it printed, failed and its message, or not installed. Nothing is simulated: both ends of
# each pair are processes of the program itself.
#
# UCX and Open MPI look for a device's file below /dev/infiniband before they ask libibverbs. A card in user space has
# none, so their rows run in a mount namespace in which such files are there (links to /dev/null, never opened).
#
# Debian's packages: ibverbs-utils perftest ucx-utils libfabric-bin openmpi-bin libopenmpi-dev python3-pyverbs.
# Left out, as a kernel must have them: raw Ethernet queue pairs (raw_ethernet_*), rdma_cm (rping, fi_pingpong -e msg).
# Exit code: 0 if all that is installed ran, 1 if one failed, 2 if the library could not be built.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 2

# ---- in the mount namespace: --files DIRECTORY DEVICES COMMAND...

if [ "${1-}" = --files ]; then
    dev=$2 devices=$3
    shift 3
    mount -t tmpfs none "$dev" && mkdir "$dev/infiniband" || exit 2
    for file in null zero full random urandom tty; do
        [ ! -e "/dev/$file" ] || { : >"$dev/$file" && mount --bind "/dev/$file" "$dev/$file"; } || exit 2
    done
    for folder in shm pts mqueue; do
        [ ! -d "/dev/$folder" ] || { mkdir "$dev/$folder" && mount --rbind "/dev/$folder" "$dev/$folder"; } || exit 2
    done
    ln -s /proc/self/fd "$dev/fd" && ln -s pts/ptmx "$dev/ptmx" || exit 2
    for device in $devices; do
        : >"$dev/infiniband/uverbs-$device" && mount --bind /dev/null "$dev/infiniband/uverbs-$device" || exit 2
    done
    mount --rbind "$dev" /dev || exit 2
    exec "$@"
fi

# ---- rows

cargo build --release --locked -p tinynccl-ibverbs || exit 2
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
mkdir "$work/lib" "$work/dev" && ln -s "$PWD/target/release/libibverbs_roce.so" "$work/lib/libibverbs.so.1" || exit 2
script=$PWD/scripts/roce-programs.sh
patterns=("$@")
failed=0 ran=0 absent=0
port=$((20000 + RANDOM % 20000))

wanted() {
    local pattern
    ((${#patterns[@]})) || return 0
    # shellcheck disable=SC2254 # a pattern is meant
    for pattern in "${patterns[@]}"; do case $1 in $pattern) return 0 ;; esac done
    return 1
}

# row NAME RESULT TEXT
row() { printf '%-34s %-14s %s\n' "$1" "$2" "$3"; }

# The last line of a log with something in it, without what only lines up.
last() { tr '\r\t' '\n ' <"$1" | grep -a -v -e '^[ +=-]*$' | tail -n 1 | tr -s ' ' | sed 's/^ //' | cut -c 1-150; }

# result NAME CODE LOG...: ok where the code is 0; else the message, and all of it below.
result() {
    local name=$1 code=$2 log=$3
    ran=$((ran + 1))
    if [ "$code" = 0 ]; then
        row "$name" ok "$(last "$log")"
        return
    fi
    failed=$((failed + 1))
    row "$name" failed "exit code $code: $(last "$log")"
    shift 2
    tail -n 15 "$@" | sed 's/^/    /'
}

# installed NAME PACKAGE PROGRAM...: whether the row runs.
installed() {
    local name=$1 package=$2 program
    wanted "$name" || return 1
    shift 2
    for program in "$@"; do
        command -v "$program" >/dev/null || {
            absent=$((absent + 1))
            row "$name" 'not installed' "$program (Debian's $package)"
            return 1
        }
    done
}

ours() { LD_LIBRARY_PATH="$work/lib" timeout -k 5 "${limit:-100}" stdbuf -oL "$@"; }

# In the mount namespace; a user namespace where we are not root.
with_files() {
    local map=(-m)
    [ "$(id -u)" = 0 ] || map=(-rm)
    ours unshare "${map[@]}" bash "$script" --files "$work/dev" "$devices" "$@"
}

listens() { grep -q -i ":$(printf '%04X' "$1") [0-9A-F]*:0000 0A " /proc/net/tcp /proc/net/tcp6; }

# pair NAME PACKAGE HOW PROGRAM ARGUMENTS...: a server, and a client once it listens. PORT in the arguments is a free one.
pair() {
    local name=$1 package=$2 how=$3 code server i
    shift 3
    installed "$name" "$package" "$1" || return 0
    port=$((port + 1))
    while listens "$port"; do port=$((port + 1)); done
    set -- "${@//PORT/$port}"
    "$how" "$@" >"$work/server" 2>&1 &
    server=$!
    for ((i = 0; i < 200; i++)); do
        listens "$port" && break
        kill -0 "$server" 2>/dev/null || break
        sleep 0.05
    done
    "$how" "$@" 127.0.0.1 >"$work/client" 2>&1
    code=$?
    wait "$server" || { [ "$code" != 0 ] || code="$? (server)"; }
    result "$name" "$code" "$work/client" "$work/server"
}

# alone NAME PACKAGE HOW PROGRAM ARGUMENTS...: one process. It must print `expected`, a pattern of grep.
alone() {
    local name=$1 package=$2 how=$3 code
    shift 3
    installed "$name" "$package" "$1" || return 0
    "$how" "$@" >"$work/client" 2>&1
    code=$?
    if [ "$code" = 0 ] && grep -a -e "$expected" "$work/client" >"$work/line"; then
        result "$name" 0 "$work/line"
        return
    fi
    [ "$code" != 0 ] || { code=1 && echo "$expected is not in what it printed" >>"$work/client"; }
    result "$name" "$code" "$work/client"
}

# ---- the card

command -v ibv_devinfo >/dev/null || {
    echo "roce-programs: ibv_devinfo is not installed, which tells the devices (Debian's ibverbs-utils)" >&2
    exit 2
}
devices=$(ours ibv_devinfo -l | awk '/^\t/ && NF { print $1 }')
# The loopback device is the last one.
device=${devices##*$'\n'}
devices=${devices//$'\n'/ }
gid=$(ours ibv_devinfo -v -d "$device" | sed -n 's/.*GID\[ *\([0-9]*\)\].*::ffff:127\.0\.0\.1.*/\1/p' | head -n 1)
[ -n "$gid" ] || { echo "roce-programs: $device has no address 127.0.0.1; devices: $devices" >&2 && exit 2; }
echo "device $device, GID index $gid"

expected=$device alone ibv_devices ibverbs-utils ours ibv_devices
expected='GID\[.*RoCE v2' alone 'ibv_devinfo -v' ibverbs-utils ours ibv_devinfo -v

# A network namespace of its own, whose interface goes down and up.
events() {
    local map=(-n)
    [ "$(id -u)" = 0 ] || map=(-rn)
    LD_LIBRARY_PATH="$work/lib" unshare "${map[@]}" bash -c '
        ip link set lo up || exit 1
        timeout 20 stdbuf -oL "$1" >"$2" 2>&1 &
        for state in "event FD" down PORT_ERR up PORT_ACTIVE; do
            case $state in
                down | up) ip link set lo "$state" || exit 1 ;;
                *)
                    for ((i = 0; i < 200; i++)); do grep -q "$state" "$2" && break; sleep 0.05; done
                    grep -q "$state" "$2" || { cat "$2" && echo "no $state" && exit 1; }
                    ;;
            esac
        done
        kill %1
        cat "$2"' -- "$1" "$work/events"
}
if installed ibv_asyncwatch 'ibverbs-utils, iproute2' ibv_asyncwatch ip; then
    expected=PORT_ACTIVE alone ibv_asyncwatch ibverbs-utils events ibv_asyncwatch
fi

pingpong() { pair "$1" ibverbs-utils ours ${1} -d "$device" -g "$gid" -p PORT -n 500; }
pingpong 'ibv_rc_pingpong -c'
pingpong 'ibv_rc_pingpong -e'
pingpong ibv_uc_pingpong
pingpong 'ibv_ud_pingpong -s 1024'
pingpong ibv_srq_pingpong

perf() { pair "$1" perftest ours ${1} -d "$device" -x "$gid" -p PORT -n "${2:-1000}" -F; }
for service in RC UC; do
    perf "ib_send_bw -c $service"
    perf "ib_send_lat -c $service"
    perf "ib_write_bw -c $service"
    perf "ib_write_lat -c $service"
done
perf 'ib_send_bw -c UD -s 1024'
perf 'ib_send_lat -c UD -s 1024'
perf ib_read_bw
perf ib_read_lat
perf 'ib_atomic_bw -A FETCH_AND_ADD'
perf 'ib_atomic_bw -A CMP_AND_SWAP'
perf ib_atomic_lat
perf 'ib_write_bw -b'
perf 'ib_write_bw -q 8' 200
perf 'ib_send_bw -r 64 --use-srq'
perf 'ib_send_lat -e'
perf 'ib_write_bw -s 8388608 -m 1024' 20
perf 'ib_send_bw -a' 100

export UCX_NET_DEVICES=$device:1
expected="Device: $device:1" alone 'ucx_info -d' ucx-utils with_files ucx_info -d
for transport in rc_v,ud_v ud_v; do
    for test in tag_lat tag_bw; do
        size=8 && [ "$test" = tag_lat ] || size=65536
        UCX_TLS=$transport pair "ucx_perftest $test ($transport)" ucx-utils with_files \
            ucx_perftest -p PORT -t "$test" -n 1000 -s "$size"
    done
done
for test in put_bw get am_lat; do
    name=ucp_$test && [ "$test" != am_lat ] || name=ucp_am_lat
    UCX_TLS=rc_v,ud_v pair "ucx_perftest $name (rc_v,ud_v)" ucx-utils with_files ucx_perftest -p PORT -t "$name" -n 1000 -s 4096
done

expected=$device alone 'fi_info -p verbs' libfabric-bin ours fi_info -p verbs
fabric() {
    local program=$1 side=-B at=$2
    [ "${!#}" != 127.0.0.1 ] || side=-P
    shift 2
    ours "$program" "$side" "$at" "$@"
}
pair 'fi_pingpong -p verbs -e rdm' libfabric-bin fabric fi_pingpong PORT -p verbs -e rdm -d "$device-dgram" -I 100

mpi() {
    installed 'Open MPI over UCX' 'openmpi-bin, libopenmpi-dev' mpirun mpicc || return 0
    cat >"$work/sum.c" <<'END'
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
/* all_reduce of lengths up to 4 MiB, each element checked. */
int main(int argc, char **argv) {
    int rank, size, wrong = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int n = 1; n <= 1 << 20; n *= 4) {
        int *in = malloc(n * sizeof *in), *out = malloc(n * sizeof *out);
        for (int i = 0; i < n; i++) in[i] = i * (rank + 1);
        MPI_Allreduce(in, out, n, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < n; i++) wrong += out[i] != i * (size * (size + 1) / 2);
        free(in), free(out);
    }
    if (rank == 0) printf("all_reduce, %d ranks: %d wrong\n", size, wrong);
    MPI_Finalize();
    return wrong != 0;
}
END
    mpicc -o "$work/sum" "$work/sum.c" 2>"$work/client" || { result 'Open MPI over UCX' 1 "$work/client" && return; }
    expected='4 ranks: 0 wrong' OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 UCX_TLS=rc_v,ud_v,self \
        alone 'Open MPI over UCX' openmpi-bin with_files mpirun -np 4 --oversubscribe --mca pml ucx --mca osc ucx --mca btl self "$work/sum"
}
mpi

# The generic part: not the tests of other vendors' extensions, of the kernel's rdma_cm, and of a domain that another
# process opens by the device's descriptor.
pyverbs() {
    local name=pyverbs tests=/usr/share/doc/rdma-core/tests
    wanted "$name" || return 0
    if ! /usr/bin/python3 -c 'import pyverbs' 2>/dev/null || [ ! -d "$tests" ]; then
        absent=$((absent + 1))
        row "$name" 'not installed' "pyverbs and $tests (Debian's python3-pyverbs)"
        return
    fi
    cp -r "$tests" "$work/tests" && gunzip -f "$work"/tests/*.gz &&
        rm -f "$work"/tests/test_{mlx5,efa,cuda,rdmacm,shared_pd}* || exit 2
    ours /usr/bin/python3 "$work/tests/run_tests.py" -v --dev "$device" --gid "$gid" >"$work/client" 2>&1
    code=$?
    grep '^Ran ' "$work/client" | tr '\n' ' ' >"$work/summary"
    tail -n 1 "$work/client" >>"$work/summary"
    result "$name" "$code" "$work/summary" "$work/client"
}
pyverbs

echo "$ran ran, $failed failed, $absent not installed"
[ "$failed" = 0 ]

#!/usr/bin/env bash
# Our RoCEv2 card (lib/softroce, through bindings/ibverbs) against the kernel's rdma_rxe, in a virtual machine, both
# ways round.
#
#   scripts/roce-interop.sh [--quick]
#
# Runs rdma-core's pingpongs and perftest unchanged: the kernel's device at 10.9.0.1, ours in a network namespace at
# 10.9.0.2, a veth pair between them. Each line says which side is the server, what ran, and its exit code; then what
# the client measured. "beside" is the kernel's device again, by a program that has our library in front: it lists both
# and opens the other's.
# A program of the library runs with a rank at each end: milestone 10, which looks at every element of every collective;
# with the feature `verbs` on the kernel's device, as it is built by default on ours. Packets are counted at the
# kernel's device. Memory windows have a program of their own (scripts/rxe-vm/windows.py). Milestone 04 gives our card
# memory of the driver vgem as a dma-buf.
# Needs what `scripts/setup.sh --verbs` installs, and a Rust toolchain. --quick: the pingpongs, and the ranks without
# loss.
# Exit code: 0 if all ran, 1 if one did not, otherwise rxe-vm.sh's.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 2
here=$PWD

if [ "${1-}" != --guest ]; then
    cargo build --release -p tinynccl-ibverbs || exit 1
    mkdir -p target/roce-interop
    # With --workspace: what other builds have of the same dependencies is used. cuda-verbs without the feature, so last.
    for end in kernel ours; do
        features=() && [ "$end" = ours ] || features=(--features stress/verbs)
        cargo build --workspace --bin stress --bin cuda-verbs "${features[@]}" &&
            cp target/debug/stress "target/roce-interop/stress-$end" || exit 1
    done
    exec scripts/rxe-vm.sh --single --timeout 900 bash "$here/scripts/roce-interop.sh" --guest "$here" "${1-}"
fi

# In the guest.
root=$2 quick=$3
mkdir -p "$TMPDIR/lib" && ln -sf "$root/target/release/libibverbs_roce.so" "$TMPDIR/lib/libibverbs.so.1" || exit 2
{
    ip netns add ours && ip link add v0 mtu 4200 type veth peer name v1 mtu 4200 netns ours &&
        ip addr add 10.9.0.1/24 dev v0 && ip link set v0 up &&
        ip -n ours addr add 10.9.0.2/24 dev v1 && ip -n ours link set v1 up && ip -n ours link set lo up &&
        rdma link add rxe9 type rxe netdev v0
} || exit 2
failed=0

kernel() { "$@" -d rxe9 "$gid" 1 "${peer[@]}"; }
beside() { LD_LIBRARY_PATH="$TMPDIR/lib" "$@" -d rxe9 "$gid" 1 "${peer[@]}"; }
ours() { LD_LIBRARY_PATH="$TMPDIR/lib" ip netns exec ours "$@" -d tinyroce0 "$gid" 0 "${peer[@]}"; }

# pair SERVER CLIENT ADDRESS PROGRAM ARGUMENTS...: waits until the server listens.
pair() {
    local server=$1 client=$2 address=$3 rc pid
    shift 3
    peer=()
    "$server" timeout 100 "$@" >"$TMPDIR/server" 2>&1 &
    pid=$!
    for _ in {1..100}; do
        { [ "$server" = ours ] && ip netns exec ours ss -Hltn || ss -Hltn; } | grep -q ':18515' && break
        sleep 0.1
    done
    peer=("$address")
    "$client" timeout 100 "$@" >"$TMPDIR/client" 2>&1
    rc=$?
    wait "$pid"
    echo "server $server, client $client: $*: exit code $rc"
    grep -v '^ *$\|^---' "$TMPDIR/client" | tail -1
    [ "$rc" = 0 ] || { failed=1 && tail -5 "$TMPDIR/client" "$TMPDIR/server"; }
}

both() {
    pair kernel ours 10.9.0.1 "$@"
    pair ours kernel 10.9.0.2 "$@"
}

# Packets that the kernel's device has sent. Its counters are up to 10 ms old.
sent() { sleep 0.05 && cat /sys/class/infiniband/rxe9/ports/1/hw_counters/sent_pkts; }

# rank END NUMBER ADDRESS ARGUMENTS...: one of two ranks, which meet at ADDRESS.
rank() {
    local end=$1 device=rxe9 inside=() job=("RANK=$2" WORLD_SIZE=2 LOCAL_RANK=0 "MASTER_ADDR=$3" MASTER_PORT=29500)
    shift 3
    [ "$end" = kernel ] || { device=tinyroce0 && inside=(ip netns exec ours); }
    "${inside[@]}" env "${job[@]}" "TINYNCCL_VERBS_DEVICE==$device" timeout 100 "$root/target/roce-interop/stress-$end" \
        --transport verbs "$@"
}

# ranks FIRST SECOND ADDRESS ARGUMENTS...: rank 0 at one end, at ADDRESS, and rank 1 at the other.
ranks() {
    local first=$1 second=$2 rc pid before packets
    before=$(sent)
    rank "$first" 0 "${@:3}" >"$TMPDIR/first" 2>&1 &
    pid=$!
    rank "$second" 1 "${@:3}" >"$TMPDIR/second" 2>&1
    rc=$?
    wait "$pid" || rc=$?
    packets=$(($(sent) - before))
    echo "rank 0 $first, rank 1 $second: stress ${*:4}: exit code $rc, $packets packets sent by the kernel's device"
    grep 'Out of bounds' "$TMPDIR/first"
    [ "$rc" = 0 ] && [ "$packets" -ge 100 ] || { failed=1 && tail -20 "$TMPDIR/first" "$TMPDIR/second"; }
}

both_ranks() {
    ranks kernel ours 10.9.0.1 "$@"
    ranks ours kernel 10.9.0.2 "$@"
}

# One list with both, from the same process.
listed=$(LD_LIBRARY_PATH="$TMPDIR/lib" ip netns exec ours ibv_devices)
case $listed in
    *rxe9*tinyroce0*) echo "rxe9 and tinyroce0 are listed" ;;
    *) failed=1 && echo "rxe9 and tinyroce0 are not both listed: $listed" ;;
esac

gid=-g
pair beside ours 10.9.0.1 ibv_rc_pingpong -n 50
pair ours beside 10.9.0.2 ibv_rc_pingpong -n 50 -e
pair beside ours 10.9.0.1 ibv_srq_pingpong -n 50
pair ours beside 10.9.0.2 ibv_ud_pingpong -n 50 -s 1000
both ibv_rc_pingpong -n 200
both ibv_rc_pingpong -n 50 -s 60000 -m 1024
both ibv_uc_pingpong -n 50 -s 1000
both ibv_ud_pingpong -n 50 -s 1000
both ibv_srq_pingpong -n 100
TINYROCE_LOSS=2 both ibv_rc_pingpong -n 100 -s 20000
options=(--path dmabuf --bytes 1000001 --chunk 64K --rounds 1)
taken=$(ip netns exec ours timeout 100 "$root/target/debug/cuda-verbs" "${options[@]}" 2>&1)
rc=$?
echo "ours: cuda-verbs --path dmabuf: exit code $rc" && grep '^1 dmabuf' <<<"$taken"
[ "$rc" = 0 ] && grep -q 'vgem exported .* tinyroce0 registered' <<<"$taken" &&
    grep -q 'every byte checked' <<<"$taken" ||
    { failed=1 && echo "$taken"; }
every=(--collective "all,pingpong,neighbours" -n 1 -w 0 --repetitions 1)
both_ranks "${every[@]}" -b 8 -e 64K -f 8192
if [ "$quick" != --quick ]; then
    both_ranks "${every[@]}" -b 1M -e 1M -d i8
    TINYROCE_LOSS=2 both_ranks "${every[@]}" -b 64K -e 64K
    # Memory windows; python3-pyverbs is among what setup.sh installs.
    both /usr/bin/python3 "$root/scripts/rxe-vm/windows.py"
    gid=-x
    both ib_write_bw -s 65536 -n 200
    both ib_read_bw -s 65536 -n 200
    both ib_read_bw -s 1000000 -n 20 -m 1024
    both ib_send_bw -s 65536 -n 200
    both ib_send_bw -c UD -s 1000 -n 200
    both ib_atomic_lat -n 100
    both ib_write_lat -s 8 -n 200
    pair beside ours 10.9.0.1 ib_read_bw -s 65536 -n 50
    pair ours beside 10.9.0.2 ib_atomic_lat -n 50
fi
exit "$failed"

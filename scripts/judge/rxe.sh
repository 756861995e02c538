#!/usr/bin/env bash
# The card in user space beside the kernel's rdma_rxe, which is its judge: the same programs run over both, in a virtual
# machine, and must print the same lines.
#
#   scripts/judge/rxe.sh
#
# The table of programs is below: results of calls (scripts/judge/verbs.c), and rdma-core's pingpongs, of which the bytes
# that were checked are compared. scripts/roce-interop.sh lets the two talk to each other.
# Needs what `scripts/setup.sh --verbs` installs (libibverbs-dev among it), and a Rust toolchain.
# Exit code: 0 if all is the same, 1 if something differs, otherwise rxe-vm.sh's.
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 2
here=$PWD

if [ "${1-}" != --guest ]; then
    cargo build --release -p tinynccl-ibverbs || exit 1
    mkdir -p target/judge && cc -O1 -Wall -o target/judge/verbs scripts/judge/verbs.c -libverbs || exit 1
    exec scripts/rxe-vm.sh --single --timeout 600 bash "$here/scripts/judge/rxe.sh" --guest "$here"
fi

# In the guest: the kernel's device at 10.9.0.1, the card in a namespace at 10.9.0.2.
root=$2
mkdir -p "$TMPDIR/lib" && ln -sf "$root/target/release/libibverbs_roce.so" "$TMPDIR/lib/libibverbs.so.1" || exit 2
{
    ip netns add ours && ip link add v0 mtu 4200 type veth peer name v1 mtu 4200 netns ours &&
        ip addr add 10.9.0.1/24 dev v0 && ip link set v0 up &&
        ip -n ours addr add 10.9.0.2/24 dev v1 && ip -n ours link set v1 up && ip -n ours link set lo up &&
        rdma link add rxe9 type rxe netdev v0
} || exit 2

kernel() { timeout 100 "${@/DEVICE/rxe9}"; }
ours() {
    local words=("${@/DEVICE/tinyroce0}")
    LD_LIBRARY_PATH="$TMPDIR/lib" TINYROCE_SYSTEM_LIBRARY='' ip netns exec ours timeout 100 "${words[@]/GID/0}"
}

# A program as server and as client of the same device; prints what the client checked.
pair() {
    "$@" >/dev/null 2>&1 &
    sleep 1 # the programs have no sign that they listen
    "$@" localhost 2>&1 | grep -o '^[0-9]* bytes\|^[0-9]* iters'
    wait
}

# NAME, then the command of it; DEVICE and GID stand for the device and the index of its IPv4 address.
table=(
    "calls|$root/target/judge/verbs DEVICE GID"
    "rc|pair ibv_rc_pingpong -d DEVICE -g GID -n 100 -c"
    "rc-events|pair ibv_rc_pingpong -d DEVICE -g GID -n 100 -e -c"
    "srq|pair ibv_srq_pingpong -d DEVICE -g GID -n 100"
    "ud|pair ibv_ud_pingpong -d DEVICE -g GID -n 100 -s 1000"
)
status=0
for row in "${table[@]}"; do
    name=${row%%|*}
    for end in kernel ours; do
        read -r -a words <<<"${row#*|}"
        [ "$end" = ours ] || words=("${words[@]/GID/1}")
        if [ "${words[0]}" = pair ]; then
            pair "$end" "${words[@]:1}"
        else
            "$end" "${words[@]}"
        fi >"$TMPDIR/$name-$end" 2>&1
        echo "exit code $?" >>"$TMPDIR/$name-$end"
    done
    if diff "$TMPDIR/$name-kernel" "$TMPDIR/$name-ours" >"$TMPDIR/diff"; then
        echo "same       $name ($(wc -l <"$TMPDIR/$name-ours") lines)"
    else
        status=1
        echo "DIFFERENT  $name (< rdma_rxe, > the card)" && sed 's/^/    /' "$TMPDIR/diff"
    fi
done
exit "$status"

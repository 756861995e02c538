#!/usr/bin/env bash
# Speed of our RoCEv2 card beside the kernel's rdma_rxe, in a virtual machine: each pair at the ends of a veth pair.
#
#   scripts/roce-speed.sh [RUNS]      default 5
#
# In turn, RUNS times: ib_write_bw of 64 KiB and ib_write_lat of 8 bytes between two devices of the kernel, then between two
# cards of ours in network namespaces. Prints every value, then the medians and ours by the kernel's (of times the kernel's by
# ours, so that more is better). Needs what scripts/roce-interop.sh needs. Exit code: 0 if all ran, otherwise rxe-vm.sh's or 1.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 2

if [ "${1-}" != --guest ]; then
    cargo build --release --locked -p tinynccl-ibverbs || exit 1
    exec scripts/rxe-vm.sh --pair --timeout 1200 bash "$PWD/scripts/roce-speed.sh" --guest "$PWD" "${1-5}"
fi

# In the guest: rxe_ab and rxe_ba are there.
root=$2 runs=$3
mkdir -p "$TMPDIR/lib" && ln -sf "$root/target/release/libibverbs_roce.so" "$TMPDIR/lib/libibverbs.so.1" || exit 2
{
    ip netns add a && ip netns add b && ip link add v0 mtu 4200 netns a type veth peer name v1 mtu 4200 netns b &&
        ip -n a addr add 10.9.0.1/24 dev v0 && ip -n a link set v0 up && ip -n a link set lo up &&
        ip -n b addr add 10.9.0.2/24 dev v1 && ip -n b link set v1 up && ip -n b link set lo up
} || exit 2

# side SERVER|CLIENT KIND PROGRAM ARGUMENTS...
side() {
    local which=$1 kind=$2 device=rxe_ba space=b peer=()
    shift 2
    if [ "$kind" = kernel ]; then
        [ "$which" = server ] || { device=rxe_ab && peer=(127.0.0.1); }
        timeout 60 "$@" -d "$device" -x 1 "${peer[@]}"
    else
        [ "$which" = server ] || { space=a && peer=(10.9.0.2); }
        LD_LIBRARY_PATH="$TMPDIR/lib" TINYROCE_SYSTEM_LIBRARY='' \
            ip netns exec "$space" timeout 60 "$@" -d tinyroce0 -x 0 "${peer[@]}"
    fi
}

# value KIND COLUMN PROGRAM ARGUMENTS...: what the client measured.
value() {
    local kind=$1 column=$2 in=() pid
    shift 2
    [ "$kind" = kernel ] || in=(ip netns exec b)
    side server "$kind" "$@" >"$TMPDIR/server" 2>&1 &
    pid=$!
    for _ in {1..200}; do
        "${in[@]}" ss -Hltn | grep -q ':18515' && break
        sleep 0.1
    done
    side client "$kind" "$@" >"$TMPDIR/client" 2>&1 && wait "$pid" || {
        tail -5 "$TMPDIR/client" "$TMPDIR/server" >&2
        return 1
    }
    awk -v c="$column" '/^ *[0-9]/ { v = $c } END { print v }' "$TMPDIR/client"
}

median() { sort -n "$1" | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }

for ((run = 1; run <= runs; run++)); do
    for kind in kernel ours; do
        for test in bw lat; do
            program=(ib_write_bw -s 65536 -n 200 -F) column=4
            [ "$test" = bw ] || program=(ib_write_lat -s 8 -n 500 -F) column=5
            got=$(value "$kind" "$column" "${program[@]}") && [ -n "$got" ] || exit 1
            echo "run $run, $kind, ${program[*]}: $got"
            echo "$got" >>"$TMPDIR/$kind-$test"
        done
    done
done
awk -v k="$(median "$TMPDIR/kernel-bw")" -v o="$(median "$TMPDIR/ours-bw")" -v kl="$(median "$TMPDIR/kernel-lat")" \
    -v ol="$(median "$TMPDIR/ours-lat")" 'BEGIN {
        printf "median of ib_write_bw 64 KiB: kernel %.2f MB/s, ours %.2f MB/s, ratio %.2f\n", k, o, o / k
        printf "median of ib_write_lat 8 B, typical: kernel %.1f us, ours %.1f us, ratio %.2f\n", kl, ol, kl / ol
    }'

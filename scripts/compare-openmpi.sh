#!/bin/sh
# all_reduce beside Open MPI, and a one-way TCP stream beside iperf3, in turn on this machine.
#
#   scripts/compare-openmpi.sh [ROUNDS]      default 5; prints Markdown tables of medians over rounds and their ratios
#
# Needs Open MPI and iperf3 (scripts/setup.sh --mpi; apt-get install iperf3) and an otherwise idle machine. Two ranks,
# one a core. RANKS, MIN, MAX, FACTOR (bytes), SECONDS_PER_SIZE and PARTS (of "shm tcp stream") may be set in the environment.
set -eu
cd "$(dirname "$0")/.."
rounds=${1:-5} ranks=${RANKS:-2} min=${MIN:-8} max=${MAX:-134217728} factor=${FACTOR:-4} seconds=${SECONDS_PER_SIZE:-0.2} parts=" ${PARTS:-shm tcp stream} "
wanted() { case $parts in *" $1 "*) ;; *) return 1 ;; esac }

for program in mpicc mpirun iperf3 awk; do
    command -v $program >/dev/null || { echo "error: $program is not installed (scripts/setup.sh --mpi; apt-get install iperf3)" >&2; exit 1; }
done
work=$(mktemp -d) server=
trap 'kill $server 2>/dev/null; rm -rf "$work"' EXIT INT TERM
cargo build --release --locked -q -p stress
mpicc -O3 -march=native -o "$work/mpi_all_reduce" scripts/peers/mpi_all_reduce.c
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

ours() { # TRANSPORT COLLECTIVE MIN MAX SECONDS
    target/release/stress --ranks "$ranks" --transport "$1" --collective "$2" -b "$3" -e "$4" -f "$factor" -c 0 --budget "$5" |
        awk '$1 ~ /^[0-9]+$/ { print $1, $6 }'
}
theirs() { # MCA OPTIONS...
    mpirun --oversubscribe --bind-to core -n "$ranks" "$@" "$work/mpi_all_reduce" "$min" "$max" "$factor" "$seconds" 2>/dev/null
}

stream() { # both for two seconds
    ours tcp broadcast 134217728 134217728 2 | awk '{ print 134217728 / $2 / 1000 }' >"$work/stream.ours.$1"
    iperf3 -s -1 -p 5209 >/dev/null & server=$!
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        sleep 0.2 # until it listens
        iperf3 -c 127.0.0.1 -p 5209 -t 2 -l 1M -J >"$work/iperf" 2>/dev/null && break
    done
    kill $server 2>/dev/null || true
    wait $server || true
    server=
    awk '/"sum_received"/ { found = 1 } found && /"bits_per_second"/ { sub(/.*: */, ""); print $0 / 8e9; exit }' "$work/iperf" >"$work/stream.theirs.$1"
}

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    if wanted shm; then
        ours shm all_reduce "$min" "$max" "$seconds" >"$work/shm.ours.$round"
        theirs >"$work/shm.theirs.$round"
    fi
    if wanted tcp; then
        ours tcp all_reduce "$min" "$max" "$seconds" >"$work/tcp.ours.$round"
        theirs --mca btl tcp,self --mca pml ob1 >"$work/tcp.theirs.$round"
    fi
    if wanted stream; then stream "$round"; fi
done

# table TITLE KIND: medians over rounds, Open MPI's time over ours.
table() {
    printf '\n### all_reduce f32, %s, %s ranks, median of %s rounds\n\n| bytes | tinynccl us | Open MPI us | Open MPI / ours |\n|---|---|---|---|\n' "$1" "$ranks" "$rounds"
    for side in ours theirs; do
        cat "$work/$2.$side".* | sort -k1,1n -k2,2g |
            awk '{ t[$1, ++n[$1]] = $2; if (n[$1] == 1) order[++k] = $1 } END { for (i = 1; i <= k; i++) print order[i], t[order[i], int((n[order[i]] + 1) / 2)] }' >"$work/$2.$side"
    done
    awk 'NR == FNR { a[$1] = $2; next } $1 in a { printf "| %s | %.2f | %.2f | %.2f |\n", $1, a[$1], $2, $2 / a[$1] }' "$work/$2.ours" "$work/$2.theirs"
}
echo "$(mpirun --version | head -1); $(iperf3 --version | head -1 | cut -d' ' -f1,2); $(rustc --version); $(uname -r); $(nproc) cores; $(git rev-parse --short HEAD)"
if wanted shm; then table 'shared memory' shm; fi
if wanted tcp; then table 'TCP on loopback' tcp; fi
wanted stream || exit 0
median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
printf '\n### one TCP stream on loopback, 128 MiB, GB/s\n\n| tinynccl broadcast | iperf3 -l 1M | ours / iperf3 |\n|---|---|---|\n'
a=$(cat "$work"/stream.ours.* | median) b=$(cat "$work"/stream.theirs.* | median)
awk -v a="$a" -v b="$b" 'BEGIN { printf "| %.2f | %.2f | %.2f |\n", a, b, a / b }'

#!/bin/bash
# In the guest (scripts/rxe-vm.sh --rails): one of two rails is made slow, and the stripes of a link over both follow.
#
#   weights.sh PERF
#
# PERF is tools/perf, built with --features verbs. Sends 96 messages of 1 MiB over equal rails, then with the second rail at
# 40 Mbit/s, and counts the packets of both. Exit code: 0 if the slow rail has carried less than three quarters of what
# the other has; cut evenly, it carries as much.
set -u
perf=$1
export TINYNCCL_VERBS_QPS=2 TINYNCCL_VERBS_TIMEOUT=18

sent() { cat "/sys/class/infiniband/$1/ports/1/hw_counters/sent_pkts"; }

# Prints the packets that the first and the second rail of rank 0 send.
run() {
    local first second
    # The counters are up to 10 ms old.
    sleep 0.05
    first=$(sent rxe_ab) second=$(sent rxe_ab2)
    # Names are prefixes: rxe_ab stands for rxe_ab2, too.
    timeout 90 "$perf" verbs link bw -s 1048576 -n 96 -d rxe_ab,rxe_ba -w yield >&2 || return 1
    sleep 0.05
    echo $(($(sent rxe_ab) - first)) $(($(sent rxe_ab2) - second))
}

read -r first second < <(run) || exit 1
echo "equal rails: $first and $second packets"
for netdev in ab2 ba2; do tc qdisc replace dev $netdev root netem limit 100000 rate 40mbit || exit 1; done
read -r first second < <(run) || exit 1
echo "the second at 40 Mbit/s: $first and $second packets"
for netdev in ab2 ba2; do tc qdisc del dev $netdev root; done
((second > 0 && 4 * second < 3 * first))

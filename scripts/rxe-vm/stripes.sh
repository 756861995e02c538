#!/bin/bash
# In the guest (scripts/rxe-vm.sh --rails): bandwidth of a link with one and with several queue pairs, on one device and on two,
# in turn.
#
#   [RATE=MBIT] stripes.sh PERF ROUNDS [BYTES...]
#
# RATE: each device sends so many Mbit/s at most, as a wire does that is slower than what drives it.
# PERF is tools/perf, built with --release --features verbs. Prints a line ROUND,DEVICES,QPS,BYTES,MiB/s for each.
set -u
perf=$1 rounds=$2
shift 2
(($#)) || set -- 65536 1048576 4194304
status=0
if [[ ${RATE:-} ]]; then
    for netdev in ab ba ab2 ba2; do tc qdisc replace dev $netdev root netem limit 100000 rate "${RATE}mbit" || exit 1; done
    # What waits in line is not lost.
    export TINYNCCL_VERBS_TIMEOUT=18
fi
for ((round = 1; round <= rounds; round++)); do
    for bytes in "$@"; do
        # About half a second.
        n=$(((24 << 20) / bytes))
        for variant in 1:1 1:2 1:4 2:2 2:4; do
            # Names are prefixes: rxe_ab stands for rxe_ab2, too.
            case $variant in
                1:*) devices=rxe_ab2,rxe_ba2 ;;
                2:*) devices=rxe_ab,rxe_ba ;;
            esac
            said=$(TINYNCCL_VERBS_QPS=${variant#*:} timeout 60 "$perf" verbs link bw -s "$bytes" -n $n -d $devices) || status=1
            echo "$round,${variant%:*},${variant#*:},$bytes,${said##*,}"
        done
    done
done
exit $status

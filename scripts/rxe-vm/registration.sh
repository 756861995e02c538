#!/bin/bash
# In the guest (scripts/rxe-vm.sh --pair): what it costs to register memory for each call, beside the copy through the link's slots
# and beside a registration that stays.
#
#   registration.sh PERF [ITERATIONS [BYTES...]]
#
# PERF is tools/perf, built with --features verbs (--release for figures to keep). A line per size: µs per message of
# a stream from rank 0 to rank 1, the least of three runs in turn.
set -u
# Without KVM an acknowledgement comes after the usual 67 ms now and then (835 repetitions in 40 runs beside builds), and rxe of
# Linux 6.1 refuses one in some thousands of the writes that are repeated in part (status 9). 1.07 s is long enough.
export TINYNCCL_VERBS_TIMEOUT=18
perf=$1 n=${2:-200}
shift $(($# < 2 ? $# : 2))
(($#)) || set -- 4096 65536 1048576 4194304
status=0
printf '%10s %12s %16s %18s\n' bytes slots 'registered once' 'for each call'
for bytes in "$@"; do
    declare -A least=()
    for _ in 1 2 3; do
        for level in comm registered registering; do
            said=$(timeout 60 "$perf" verbs $level bw -s "$bytes" -n "$n" -d rxe_ab,rxe_ba -w yield) || status=1
            rate=${said##*,}
            [[ $rate =~ ^[0-9.]+$ ]] || { echo "registration: $level with $bytes bytes failed: $said" && exit 1; }
            least[$level]=$(awk -v r="$rate" -v b="$bytes" -v m="${least[$level]:-1e99}" \
                'BEGIN { t = b / r / 1.048576; print (t < m) ? t : m }')
        done
    done
    printf '%10s %9.1f us %13.1f us %15.1f us\n' "$bytes" "${least[comm]}" "${least[registered]}" "${least[registering]}"
done
exit $status

#!/bin/bash
# In the guest: a program gives the same weights over RDMA as over TCP, bit for bit, and RDMA carried them.
#
#   same.sh PACKETS COMMAND [ARGUMENTS...]
#
# Runs COMMAND with TINYNCCL_TRANSPORT=tcp, then with verbs, each in a folder of its own. Compared: every fingerprint that it prints
# (16 hexadecimal digits) and every file checkpoint.bin that it leaves. The devices must have sent at least PACKETS more
# packets with verbs, and none with tcp. Exit code: 0 if all of that holds.
set -u -o pipefail
least=$1
shift

fail() {
    echo "same: $*"
    exit 1
}

# The devices hand out counters that are up to 10 ms old.
packets() {
    sleep 0.05
    cat /sys/class/infiniband/*/ports/1/hw_counters/sent_pkts | awk '{ sum += $1 } END { print sum + 0 }'
}

for transport in tcp verbs; do
    mkdir -p "$TMPDIR/$transport" && cd "$TMPDIR/$transport" || exit 1
    before=$(packets)
    TINYNCCL_TRANSPORT=$transport timeout 170 "$@" >output 2>&1
    status=$?
    cat output
    ((status == 0)) || fail "over $transport: exit code $status"
    sent=$(($(packets) - before))
    echo "same: over $transport, $sent packets of RDMA, $(awk '{ print $1 " s up" }' /proc/uptime)"
    case $transport in
        tcp) ((sent == 0)) || fail "$sent packets of RDMA though TCP was asked for" ;;
        verbs) ((sent >= least)) || fail "$sent packets of RDMA, expected $least or more" ;;
    esac
    grep -o -E '\b[0-9a-f]{16}\b' output >weights
    find . -name checkpoint.bin -exec sha256sum {} + >>weights
done
cd "$TMPDIR" || exit 1
[[ -s tcp/weights ]] || fail "no fingerprint and no checkpoint"
diff tcp/weights verbs/weights || fail "the weights differ"
echo "same: $(wc -l <tcp/weights) fingerprints are equal"
rm -r tcp verbs

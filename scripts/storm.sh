#!/usr/bin/env bash
# A storm of cable faults: two ranks on two nodes with two cables make calls over rails, and compare every value, while
# cables are cut, block one way, drop at the sender, lose long packets or some, are slow or lose their address, in any
# order. Ends by itself; exit status 1 if a call failed, a value was wrong or a mended cable stayed unused.
#
#   scripts/storm.sh [-s | -m] [SECONDS [SEED]]      300 seconds and a new seed; an hour: 3600
#
#   -s  also on the cable of the store, over which the ranks meet and say that they are there
#   -m  faults of members instead: up to nine processes train as a group that ranks leave (killed or stopped) and
#       newcomers join, over shared memory, then over TCP; exit status 1 also if weights differ. Needs nothing more
#
# The tests (lib/tests/cpu/storm.rs, churn/) run half a minute of each. Needs unshare, nsenter and ip, and user
# namespaces where it is not run by root; tc (bfifo, tbf) and nft (numgen) for the faults that they make, which are left
# out without them.
set -eu -o pipefail
cd "$(dirname "$0")/.."
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0" >&2; exit 2; }
test=storm::a_storm_of_cable_faults_costs_no_call
while getopts sm option; do
    case $option in
        s) export TINYNCCL_TEST_STORM_STORE=1 ;;
        m) test=churn::a_storm_of_lost_and_gained_members_costs_no_step ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
(($# <= 2)) || usage
export TINYNCCL_TEST_STORM_SECONDS=${1:-300} TINYNCCL_TEST_STORM_SEED=${2:-$RANDOM}
exec cargo test -q --locked -p tinynccl --test cpu -- --exact "$test" --nocapture

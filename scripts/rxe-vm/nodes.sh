#!/usr/bin/env bash
# Runs a command once per node of the virtual machine's network, as one job: rank 0 on node a, rank 1 on node b, and so on.
#
#   scripts/rxe-vm.sh --line bash scripts/rxe-vm/nodes.sh COMMAND [ARGUMENTS...]
#
# Each rank sees only the devices of its node. Exit code: that of the first rank that failed, by number, else 0.
set -u
case ${RXE_VM:-} in
    pair) nodes=(rxe_ab rxe_ba) ;;
    rails) nodes=("rxe_ab,rxe_ab2" "rxe_ba,rxe_ba2") ;;
    line) nodes=(rxe_ab "rxe_ba,rxe_bc" rxe_cb) ;;
    triangle) nodes=("rxe_ab,rxe_ac" "rxe_ba,rxe_bc" "rxe_cb,rxe_ca") ;;
    *) echo "nodes.sh: run it in scripts/rxe-vm.sh --pair, --rails, --line or --triangle" >&2 && exit 2 ;;
esac
(($#)) || { echo "nodes.sh: no command given" >&2 && exit 2; }
export WORLD_SIZE=${#nodes[@]} MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 TINYNCCL_TRANSPORT=verbs
ranks=()
for rank in "${!nodes[@]}"; do
    RANK=$rank LOCAL_RANK=$rank TINYNCCL_VERBS_DEVICE=${nodes[rank]} "$@" &
    ranks+=($!)
done
status=0
for rank in "${ranks[@]}"; do
    wait "$rank"
    rc=$?
    ((status)) || status=$rc
done
exit $status

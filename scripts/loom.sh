#!/bin/sh
# Model-checks what is shared between ranks with loom: rings (lib/transport/src/shm/model.rs) and the board
# (lib/comm/src/symmetric/model.rs). A few minutes on two cores, most of them for the ring.
#
#   scripts/loom.sh [PART OF A TEST'S NAME]...
#
# Prints for each scenario in how many executions it holds, and how it fails with a step of the protocol weakened.
# LOOM_MAX_PREEMPTIONS=N overrules the bounds on preemptions which some scenarios have. Builds into target/loom, because
# --cfg loom is another build of everything.
set -eu
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg loom ${RUSTFLAGS:-}" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom" RUST_BACKTRACE=0
[ $# -gt 0 ] || set -- shm::model symmetric::model
exec cargo test --locked -p tinynccl-transport -p tinynccl-comm --lib -- --nocapture "$@"

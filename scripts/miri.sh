#!/bin/sh
# Runs under Miri what can run there: the modules that only compute.
#
#   scripts/miri.sh [FILTER OF cargo test...]
#
# Needs a nightly toolchain with the components miri and rust-src (rustup toolchain install nightly -c miri -c rust-src).
# Exit code 2 when they are not there. Left out: whatever makes system calls that Miri does not know (sockets,
# memfd, poll of an eventfd), which is all of the transport; scripts/loom.sh and scripts/sanitize.sh check the rings.
set -eu
cd "$(dirname "$0")/.."
if ! cargo +nightly miri --version >/dev/null 2>&1; then
    echo "miri: needs a nightly toolchain with the miri component: rustup toolchain install nightly -c miri -c rust-src" >&2
    exit 2
fi
[ $# -gt 0 ] || set -- wire:: dtype:: schedule:: algorithm:: reduce:: config:: bootstrap::wire::frame bootstrap::wire::message \
    bootstrap::environment::detect unique_id::tests::text unique_id::tests::bad unique_id::tests::any
export MIRIFLAGS="${MIRIFLAGS:--Zmiri-permissive-provenance}" PROPTEST_CASES="${PROPTEST_CASES:-8}"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri"
exec cargo +nightly miri test --locked -p tinynccl-comm -p tinynccl-plan -p tinynccl-sys -p tinynccl-transport --lib -- "$@"

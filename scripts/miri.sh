#!/bin/sh
# Runs under Miri what can run there: modules that compute, and the ring over memory of the process.
#
#   scripts/miri.sh [FILTER OF cargo test...]
#
# Needs a nightly toolchain with the components miri and rust-src (rustup toolchain install nightly -c miri -c rust-src).
# Exit code 2 when they are not there. Modules that make system calls which Miri does not know (sockets, membarrier, memfd,
# poll of an eventfd) are left out by the filter below, single tests by cfg_attr(miri, ignore).
set -eu
cd "$(dirname "$0")/.."
if ! cargo +nightly miri --version >/dev/null 2>&1; then
    echo "miri: needs a nightly toolchain with the miri component: rustup toolchain install nightly -c miri -c rust-src" >&2
    exit 2
fi
[ $# -gt 0 ] || set -- wire:: dtype:: schedule:: algorithm:: reduce:: config:: bootstrap::frame bootstrap::message \
    bootstrap::unique_id bootstrap::detect transport::handshake transport::ring
export MIRIFLAGS="${MIRIFLAGS:--Zmiri-permissive-provenance}" PROPTEST_CASES="${PROPTEST_CASES:-8}"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri"
exec cargo +nightly miri test --locked -p tinynccl --lib -- "$@"

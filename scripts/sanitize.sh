#!/bin/sh
# Runs tests of the library under LLVM's sanitizers.
#
#   scripts/sanitize.sh [address|thread] [FILTER OF cargo test...]
#
# address  unit tests of the rings, the reduction kernels, the executor's parts and all parsers
# thread   the ring
#
# Works on a stable toolchain that ships the sanitizers' runtimes (rustup's does on x86-64 Linux): RUSTC_BOOTSTRAP=1
# unlocks the flag. std itself is not instrumented (that needs -Zbuild-std and a nightly). So the thread sanitizer does not
# see what std's locks and threads order, and takes everything under a Mutex for a race: it is of use for the ring alone,
# not for ranks as threads. It does not understand fences either, only acquire and release; the order that the fences
# make is checked by scripts/loom.sh. Builds into target/sanitize.
set -eu
cd "$(dirname "$0")/.."
kind=${1:-address}
[ $# -eq 0 ] || shift
case $kind in
    address) [ $# -gt 0 ] || set -- shm:: tcp:: inproc:: verbs:: rails:: relay:: accept:: endpoint:: wrap:: reduce:: executor:: fuzzing:: bootstrap::wire wire:: schedule::partition ;;
    thread) [ $# -gt 0 ] || set -- shm:: ;;
    *) echo "sanitize: unknown sanitizer '$kind', expected address or thread" >&2; exit 2 ;;
esac
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/sanitize/$kind"
export RUSTFLAGS="-Zsanitizer=$kind -Cunsafe-allow-abi-mismatch=sanitizer ${RUSTFLAGS:-}"
export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_leaks=1}"
export TSAN_OPTIONS="${TSAN_OPTIONS:-suppressions=$PWD/scripts/tsan.supp}"
# With a target named, build scripts and procedural macros are built without the sanitizer.
exec cargo test --locked -p tinynccl-comm -p tinynccl-plan -p tinynccl-sys -p tinynccl-transport --lib --target "$host" -- "$@"

#!/bin/sh
# Fuzzes every parser of bytes or text from outside, one after the other.
#
#   scripts/fuzz.sh [SECONDS [TARGET...]]      default: 60 seconds for each of fuzz/fuzz_targets
#
# Needs cargo-fuzz (cargo install cargo-fuzz) and a C++ compiler for the fuzzer's runtime. With a stable toolchain the
# sanitizer's flags are unlocked by RUSTC_BOOTSTRAP=1. Starts from fuzz/corpus and keeps what is new in fuzz/found, which
# git ignores; a failing input goes to fuzz/artifacts. The plain tests replay fuzz/corpus without any of this.
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-60}
[ $# -eq 0 ] || shift
command -v cargo-fuzz >/dev/null || { echo "fuzz: cargo-fuzz is not installed: cargo install cargo-fuzz" >&2; exit 2; }
command -v c++ >/dev/null || command -v g++ >/dev/null || { echo "fuzz: no C++ compiler: apt-get install g++" >&2; exit 2; }
export RUSTC_BOOTSTRAP=1
[ $# -gt 0 ] || set -- $(cd fuzz/fuzz_targets && ls | sed 's/\.rs$//')
cargo fuzz build
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
for target in "$@"; do
    mkdir -p "fuzz/found/$target"
    if cargo fuzz run "$target" "fuzz/found/$target" "fuzz/corpus/$target" -- \
        -max_total_time="$seconds" -timeout=10 -max_len=4096 -print_final_stats=1 >"$log" 2>&1; then
        awk -v t="$target" '/number_of_executed_units/ { n = $2 } /cov:/ { c = $0; sub(/.*cov: /, "", c); sub(/ .*/, "", c) }
            END { print t ": " n " executions, " c " edges, nothing found" }' "$log"
    else
        echo "$target: FAILED" && tail -n 40 "$log"
        status=1
    fi
done
exit $status

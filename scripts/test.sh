#!/bin/sh
# Runs every test of the workspace: unit tests, tests with several ranks as threads and as processes, doc tests.
#
#   scripts/test.sh [ARGUMENTS OF cargo test]
#
# Needs Rust and a C linker. Installs nothing; says first what is skipped and why. The last line is the total.
set -u
cd "$(dirname "$0")/.." || exit 1

say() { printf '%s\n' "test: $*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

# at_least VERSION MINIMUM: compares MAJOR.MINOR.
at_least() {
    major=${1%%.*} rest=${1#*.}
    minor=${rest%%.*}
    [ "$major" -gt "${2%%.*}" ] || { [ "$major" -eq "${2%%.*}" ] && [ "$minor" -ge "${2#*.}" ]; }
}

if ! have cargo || ! have rustc; then
    say "error: cargo and rustc are not on the PATH; install Rust from https://rustup.rs"
    exit 1
fi
minimum=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
version=$(rustc --version | cut -d ' ' -f 2)
if ! at_least "$version" "$minimum"; then
    say "error: rustc is $version, this workspace needs $minimum or later; 'rustup update' gets it"
    exit 1
fi
if ! have cc && ! have gcc && ! have clang; then
    say "error: no C linker (cc): install a C compiler, for example 'apt-get install gcc libc6-dev'"
    exit 1
fi

have mpirun || say "SKIPPED: starting ranks by mpirun, as mpirun is not installed (scripts/setup.sh --mpi)"
# The same two that the test tries: Debian's package belongs to /usr/bin/python3, which another python3 may hide.
python3 -c 'import torch, numpy' 2>/dev/null || /usr/bin/python3 -c 'import torch, numpy' 2>/dev/null ||
    say "SKIPPED: comparison of gradients with PyTorch, as no python3 can import torch (apt-get install python3-torch)"

# What an incremental build writes down costs a fifth of the time where nothing was built before. Where something was, a
# build of the other kind would begin anew. The folder itself says nothing: cargo makes it in any case.
[ "$(ls -A "${CARGO_TARGET_DIR:-target}/debug/incremental" 2>/dev/null)" ] || export CARGO_INCREMENTAL="${CARGO_INCREMENTAL:-0}"

# Most tests wait for something: on few cores more of them run at a time than there are cores.
threads=$(nproc)
[ "$threads" -ge 4 ] || threads=4
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$threads}"

status=$(mktemp) && log=$(mktemp) || exit 1
trap 'rm -f "$status" "$log"' EXIT
trap 'exit 130' INT TERM HUP
{
    cargo test --workspace --no-fail-fast "$@"
    echo $? >"$status"
} 2>&1 | tee "$log"

echo
grep '^test result: FAILED' "$log"
grep '^test .* FAILED$' "$log"
awk '/^test result:/ { for (i = 1; i < NF; i++) { if ($(i+1) == "passed;") p += $i; if ($(i+1) == "failed;") f += $i;
     if ($(i+1) == "ignored;") s += $i } } END { printf "total: %d passed, %d failed, %d skipped\n", p, f, s }' "$log"
rc=$(cat "$status")
exit "${rc:-1}"

#!/usr/bin/env bash
# Says whether the public interfaces of the crates fit their version: compares them with a release by cargo-semver-checks.
#
#   scripts/semver.sh [REVISION]    default: the newest tag vX.Y.Z
#
# Exit status: 0 they fit, 1 they do not, 77 there is no release to compare with or no cargo-semver-checks.
set -eu -o pipefail
cd "$(dirname "$0")/.."
revision=${1:-$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null || true)}
[[ $revision ]] || { echo "semver: no tag vX.Y.Z: before the first release there is nothing to compare with" >&2; exit 77; }
cargo semver-checks --version >/dev/null 2>&1 || {
    echo "semver: no cargo-semver-checks: 'cargo install --locked cargo-semver-checks' (about ten minutes on two cores)" >&2
    exit 77
}
# Only what programs name: what the crates below make public for the crate above may change at any time.
exec cargo semver-checks --baseline-rev "$revision" -p tinynccl -p softroce -p softroce-verbs

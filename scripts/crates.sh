#!/usr/bin/env bash
# Makes the packages of the crates that are published, and builds each from its package, with the others as a registry would give them.
# Nothing is sent anywhere.
#
#   scripts/crates.sh [--list]    --list: what each package holds, without a build
set -eu -o pipefail
cd "$(dirname "$0")/.."
# All but the programs: a crate without `publish = false`.
packages=$(cargo metadata --locked --no-deps --format-version 1 |
    python3 -c 'import json, sys; print(*sorted(p["name"] for p in json.load(sys.stdin)["packages"] if p["publish"] is None))')
for package in $packages; do set -- "$@" -p "$package"; done
if [[ ${1-} == --list ]]; then
    shift
    exec cargo package --locked --list "$@"
fi
cargo package --locked "$@"
echo
ls -l target/package/*.crate | awk '{ n = split($NF, part, "/"); printf "%8d bytes  %s\n", $5, part[n] }'

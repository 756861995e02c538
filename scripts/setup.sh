#!/bin/sh
# Installs the optional things that some tests and comparisons use. Nothing here is needed to build or to train.
#
#   scripts/setup.sh --mpi        Open MPI (mpirun), through apt-get, as root
#   scripts/setup.sh --deny       cargo-deny, the licence and source checker, through cargo (about two minutes)
#
# What is there already is left alone. Exit code: 0 all asked for is there; 1 something could not be installed; 2 usage.
set -u

say() { printf '%s\n' "setup: $*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }
log=
trap '[ -z "$log" ] || rm -f "$log"' EXIT

mpi() {
    have mpirun && { say "mpirun is there: $(mpirun --version 2>/dev/null | head -n 1)"; return 0; }
    have apt-get || { say "no apt-get here: install Open MPI yourself (package openmpi-bin or openmpi)"; return 1; }
    [ "$(id -u)" = 0 ] || { say "not root: run 'sudo apt-get install openmpi-bin'"; return 1; }
    log=$(mktemp) || return 1
    say "installing openmpi-bin through apt-get"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -q --no-install-recommends openmpi-bin >"$log" 2>&1 && return 0
    # The package lists may be missing or old.
    apt-get update -q >"$log" 2>&1 && apt-get install -y -q --no-install-recommends openmpi-bin >>"$log" 2>&1 && return 0
    say "apt-get could not install openmpi-bin:"
    tail -n 5 "$log" >&2
    return 1
}

deny() {
    cargo deny --version >/dev/null 2>&1 && { say "$(cargo deny --version) is there"; return 0; }
    say "installing cargo-deny through cargo (about two minutes)"
    cargo install --quiet --locked cargo-deny --version '^0.20'
}

[ $# -gt 0 ] || set -- --help
status=0
for argument in "$@"; do
    case $argument in
        --mpi) mpi || status=1 ;;
        --deny) deny || status=1 ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" ;;
        *) say "unknown option '$argument', expected --mpi or --deny"; exit 2 ;;
    esac
done
exit $status

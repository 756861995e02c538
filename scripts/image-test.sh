#!/usr/bin/env bash
# Runs the Dockerfile's steps for CPUs without a container runtime: in a bare Debian, made by debootstrap. States sizes and times.
#
#   scripts/image-test.sh [DIR]    the root folder, default target/image; one that is there is used again
#
# The base image's part, Rust, is this machine's toolchain, and its crates are those that cargo has fetched here. Needs root, git,
# debootstrap (DEBOOTSTRAP names it). Exit status: 0 all steps passed, 1 one did not, 77 it cannot be done here.
set -eu -o pipefail
cd "$(dirname "$0")/.."
root=${1:-target/image}
debootstrap=${DEBOOTSTRAP:-debootstrap}
[[ $(id -u) = 0 ]] && command -v "$debootstrap" unshare >/dev/null || { echo "image-test: needs root, debootstrap and unshare" >&2; exit 77; }
suite=$(sed -n 's/^ARG RUST=.*-slim-\(.*\)$/\1/p' Dockerfile)
mkdir -p "$root"
root=$(cd "$root" && pwd)
size() { du -sm --exclude=proc --exclude=dev "$root" | cut -f 1; }
step() {
    local name=$1 start=$SECONDS
    shift
    "$@" >"$root.log" 2>&1 || { echo "image-test: FAILED: $name"; tail -n 20 "$root.log"; exit 1; }
    printf '| %s | %d s | %d MB |\n' "$name" $((SECONDS - start)) "$(size)"
}

printf '| step | time | size after it |\n|---|--:|--:|\n'
[[ -x $root/bin/bash ]] || step "debootstrap --variant=minbase $suite" "$debootstrap" --variant=minbase "$suite" "$root" http://deb.debian.org/debian
# FROM rust: the toolchain that compiles here, without its documentation.
sysroot=$(rustc --print sysroot)
rust() {
    mkdir -p "$root/usr/local/rust" "$root/usr/local/cargo"
    cp -r "$sysroot"/{bin,lib} "$root/usr/local/rust"
    cp -r "${CARGO_HOME:-$HOME/.cargo}/registry" "$root/usr/local/cargo"
}
step 'Rust and fetched crates' rust
# COPY: the commit, as in a clone; .dockerignore leaves out what git does not have.
copy() { rm -rf "$root/tinynccl" && mkdir "$root/tinynccl" && git archive HEAD | tar -x -C "$root/tinynccl"; }
inside() {
    unshare --mount --pid --fork bash -c '
        mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && cp /etc/resolv.conf "$0/etc/resolv.conf" &&
        exec chroot "$0" /usr/bin/env -i HOME=/root CARGO_HOME=/usr/local/cargo CARGO_NET_OFFLINE=true \
            PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -c "mkdir -p /tinynccl && cd /tinynccl && $1"' "$root" "$1"
}
copied=no
# Of the stages that a build for CPUs takes, those behind `AS tools`.
while IFS= read -r line; do
    case $line in
        COPY*) copied=yes; step 'COPY . .' copy ;;
        RUN*) step "\`${line#RUN }\`" inside "${line#RUN }" ;;
    esac
done < <(sed -e ':a' -e '/\\$/{N;s/ *\\\n */ /;ba;}' Dockerfile | sed '1,/ AS tools$/d')
[[ $copied = yes ]]
# What CI runs in the image.
step 'allreduce-tcp' inside 'cargo run --release --locked -p allreduce-tcp -- --ranks 2 --bytes 1K --iters 5'
step 'cargo xtask list' inside 'cargo xtask list'

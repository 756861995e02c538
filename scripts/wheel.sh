#!/usr/bin/env bash
# Builds the wheel of a release: the extension, tinynccl-cli, libnccl.so.2, the network plugin and libibverbs.so.1.
#
#   scripts/wheel.sh [DIR]    default: target/dist; GLIBC names the oldest glibc to run on, default 2.28
#
# scripts/setup.sh --wheel installs what it needs. Exit status: 0 the wheel is there and auditwheel agrees with its tag, 1 failed,
# 77 the tools are missing.
set -eu -o pipefail
cd "$(dirname "$0")/.."
out=${1:-target/dist} glibc=${GLIBC:-2.28}
export PATH=$PWD/target/maturin/bin:$PATH
for tool in maturin cargo-zigbuild auditwheel patchelf; do
    command -v $tool >/dev/null || { echo "wheel: no $tool: scripts/setup.sh --wheel installs it" >&2; exit 77; }
done

prefix=target/dist/wheel
native=bindings/python/python/tinynccl/_native
rm -rf "$prefix" "$native"
mkdir -p "$out"
cargo xtask dist --glibc "$glibc" --prefix "$prefix" >/dev/null
mkdir -p "$native"
trap 'rm -rf "$native"' EXIT
# No links: a wheel has none.
cp "$prefix"/lib/tinynccl/{libnccl.so.2,libnccl_audit.so,libibverbs.so.1} "$prefix"/lib/libnccl-net-tinynccl.so "$prefix"/bin/tinynccl-cli "$native"

tag=manylinux_${glibc/./_}
# As xtask dist builds, so that the library is built once; no path of this machine is in it.
sources=$(cargo metadata --locked --format-version 1 | python3 -c '
import json, os, sys
print(os.path.dirname(os.path.dirname(next(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["source"]))))')
export RUSTFLAGS="${RUSTFLAGS:+$RUSTFLAGS }--remap-path-prefix=$PWD=tinynccl --remap-path-prefix=$sources=crates"
maturin build --zig --profile dist --locked --compatibility "$tag" --target "$(uname -m)-unknown-linux-gnu" -m bindings/python/Cargo.toml -o "$out"
wheel=$(find "$out" -maxdepth 1 -name "tinynccl-*-cp311-abi3-${tag}_*.whl" | sort | tail -n 1)
auditwheel show "$wheel" | tee "$out/auditwheel.txt"
# The tag promises no more than the symbols keep. auditwheel names the oldest policy that all of its libraries meet.
grep -q '"manylinux_2_\([0-9]*\)_' "$out/auditwheel.txt"
least=$(sed -n 's/.*"manylinux_2_\([0-9]*\)_.*/\1/p' "$out/auditwheel.txt" | head -n 1)
if ((least > ${glibc#*.})); then
    echo "wheel: its libraries need glibc 2.$least" >&2
    exit 1
fi
python3 -m zipfile -l "$wheel"

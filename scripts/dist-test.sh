#!/usr/bin/env bash
# Makes the tarball of `cargo xtask dist`, unpacks it elsewhere, and uses it there from C and from a shell.
#
#   scripts/dist-test.sh [OPTIONS of cargo xtask dist, as --glibc 2.28]
#
# Needs a C compiler and pkg-config. Exit status: 0 passed, 1 failed, 77 no pkg-config.
set -eu -o pipefail
cd "$(dirname "$0")/.."
command -v pkg-config >/dev/null || { echo "dist-test: no pkg-config" >&2; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo xtask dist --tarball "$work/out" "$@"
cd "$work/out"
sha256sum --check --quiet SHA256SUMS
python3 -c 'import json, sys; s = json.load(open(sys.argv[1])); print(len(s["components"]), "components in the SBOM")' ./*.cdx.json
mkdir "$work/elsewhere"
tar -xzf ./*.tar.gz -C "$work/elsewhere"
prefix=$(echo "$work"/elsewhere/*)
(cd "$prefix" && find . -type f -o -type l | sort | xargs ls -l | awk '{ print $5, $9, $10, $11 }')

cat >"$work/version.c" <<'EOF'
#include <nccl.h>
#include <stdio.h>
int main(void) {
    int version = 0;
    ncclUniqueId id;
    if (ncclGetVersion(&version) != ncclSuccess || ncclGetUniqueId(&id) != ncclSuccess) return 1;
    printf("NCCL's interface %d\n", version);
    return 0;
}
EOF
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
# Flags are words.
# shellcheck disable=SC2046
cc -Wall -Werror "$work/version.c" -o "$work/version" $(pkg-config --cflags --libs tinynccl-nccl)
"$work/version"
cat >"$work/verbs.c" <<'EOF'
struct ibv_device;
struct ibv_device **ibv_get_device_list(int *count);
int main(void) { int count = 0; return ibv_get_device_list(&count) == 0; }
EOF
# shellcheck disable=SC2046
cc "$work/verbs.c" -o "$work/verbs" $(pkg-config --cflags --libs tinynccl-ibverbs)
"$work/verbs"
"$prefix/bin/tinynccl" doctor >"$work/doctor"
grep -qF "$prefix/lib/tinynccl/libnccl.so.2" "$work/doctor"
"$prefix/bin/tinynccl" run -- "$work/version"
bash -n "$prefix/share/bash-completion/completions/tinynccl"
for page in tinynccl tinynccl-run tinynccl-simulate; do [[ -s $prefix/share/man/man1/$page.1 ]]; done
echo "dist-test: passed"

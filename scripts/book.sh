#!/usr/bin/env bash
# The book: builds it and checks it.
#
#   scripts/book.sh build     into target/book (start at target/book/index.html); fails on a broken link, a missing item of code
#                             or a block of code that is written by hand
#   scripts/book.sh check     build, draw the pictures again and compare, run every command whose output the book or a README shows,
#                             and compare
#   scripts/book.sh bless     run those commands and keep what they print
#   scripts/book.sh look      every page of the built book in headless Chromium, 1280 and 390 pixels wide: fails on what sticks
#                             out, on words whose contrast is too low (WCAG AA) and on errors in the console; screenshots into
#                             target/book-shots, none with --quiet.
#                             --only PART: only pages whose path contains PART; --dark: in the dark theme
#   scripts/book.sh serve     build, and serve it on http://127.0.0.1:4780
#
# Needs mdbook 0.5 (scripts/setup.sh --book), `check` Python; `look` needs Chromium (scripts/setup.sh --chromium).
set -euo pipefail
cd "$(dirname "$0")/.."

# With --workspace, so that dependencies have the features that they have in a build of everything: what `cargo test` has built is used.
cargo=(cargo build -q --locked --workspace --bin tinynccl-book)
tool=$(realpath -m "${CARGO_TARGET_DIR:-target}/debug/tinynccl-book")
tool() { "${cargo[@]}" && "$tool" "$@"; }

build() {
    command -v mdbook >/dev/null || { echo "book: no mdbook: scripts/setup.sh --book" >&2; exit 1; }
    "${cargo[@]}" --bin tinynccl-cli --bin stress
    # mdbook's own variable in place of book.toml's `cargo run`, for its preprocessor of this name.
    local name=tinynccl
    env "MDBOOK_PREPROCESSOR__${name^^}__COMMAND=$tool preprocess" mdbook build docs/book
    tool finish target/book
    tool links target/book
}

outputs() {
    "${cargo[@]}" --bins --example all_reduce
    tool outputs "$@"
}

case ${1:-} in
    build) build ;;
    check) python3 docs/book/pictures/draw.py --check; build; outputs ;;
    bless) shift && outputs --bless "$@" ;;
    look) shift && tool look target/book "$@" ;;
    serve) build; python3 -m http.server --bind 127.0.0.1 --directory target/book 4780 ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 2 ;;
esac

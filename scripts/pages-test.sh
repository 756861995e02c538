#!/usr/bin/env bash
# Looks at the pages of schedules and of replayed runs in a real browser: every button and key, bytes, calls and messages counted,
# no error on the console, nothing wider than the window at the width of a desktop (1280) and of a phone (390), and something
# drawn; a replay in both themes.
#
#   scripts/pages-test.sh [FOLDER]     pages and pictures are kept in FOLDER, otherwise thrown away
#
# As root on Debian it installs Chromium if it is missing. Exit status: 0 passed, 1 failed, 77 no browser can be had here.
set -eu -o pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh --chromium || { echo "pages-test: SKIPPED: no Chromium here, and it could not be installed" >&2; exit 77; }

folder=${1-}
if [[ -z $folder ]]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"
cargo build -q --locked --workspace --bin tinynccl-cli --bin tinynccl-book --bin stress
target=${CARGO_TARGET_DIR:-target}/debug
page() { "$target/tinynccl-cli" schedule "$1" "$2" --ranks "$3" --format html --output "$folder/$1-$2-$3.html"; }
page all-reduce ring 2
page all-reduce ring 4
page all-reduce tree 8
page all-reduce double-tree 7
page all-reduce halving-doubling 6
page all-gather ring 5
page all-to-all direct 4
page broadcast direct 3
# Replays: links and the memory that ranks share, and both side by side.
run() { "$target/stress" --ranks 4 -b 32K -e 32K -n 5 -w 1 --algo "$1" --replay "$folder/run-$1.html" >"$folder/$1.log" 2>&1; }
run ring
run one-shot
"$target/tinynccl-cli" replay "$folder/run-ring.trace.json" "$folder/run-one-shot.trace.json" --html "$folder/run-both.html"
check() { "$target/tinynccl-book" click --pictures "$1" "${@:2}"; }
check "$folder/pictures" "$folder"/*.html

# The check can fail: an error in the script, words that are too wide, and a button that does nothing are found.
broken="$folder/broken"
mkdir -p "$broken"
good="$folder/all-reduce-ring-4.html"
sed 's/<script>/<script>console.error("broken");/' "$good" >"$broken/console.html"
sed 's/}p{margin/}p{width:900px;margin/' "$good" >"$broken/wide.html"
sed "s/getElementById('forward').onclick/getElementById('forward').none/" "$good" >"$broken/button.html"
run="$folder/run-ring.html"
sed "s/\$('call').onclick/\$('call').none/" "$run" >"$broken/next.html"
sed 's/i<m.length;i+=4/i<m.length;i+=8/' "$run" >"$broken/messages.html"
sed 's/canvas{display:block;width:100%}/canvas{display:block;width:100%;min-width:1300px}/' "$run" >"$broken/canvas.html"
for page in console wide button next messages canvas; do
    if check "$broken/pictures" "$broken/$page.html" >"$broken/$page.log" 2>&1; then
        echo "pages-test: FAILED: a page with a fault ($page) passed"
        exit 1
    fi
    grep -q FAILED "$broken/$page.log" || { echo "pages-test: FAILED: no fault was named"; cat "$broken/$page.log"; exit 1; }
done
echo "pages-test: pages are right, and six broken ones were found out"

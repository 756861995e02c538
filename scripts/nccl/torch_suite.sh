#!/usr/bin/env bash
# PyTorch's own distributed_test with BACKEND=nccl over several libraries in turn, on a machine with two GPUs:
#
#   scripts/nccl/torch_suite.sh [-j JOBS] [-l SECONDS] [-t PATTERN] OUT NAME=LIBRARY...
#
# LIBRARY is preloaded; an empty one is torch's own. PATTERN chooses tests by name, as grep -E does. The tests of a
# library run in JOBS parts at once (default 6), for at most SECONDS (default 900); those that failed run again one by
# one, because parts that share a GPU may be too slow for their limits. OUT gets the logs, NAME.txt with the end of
# each test (passed, FAILED, skipped, not run), and compare.txt with the tests that end differently. Exit status 1 if
# a test passes over the first library and not over another.
set -eu -o pipefail
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0" >&2; exit 2; }
jobs=6 limit=900 pattern=.
while getopts j:l:t: option; do
    case $option in j) jobs=$OPTARG ;; l) limit=$OPTARG ;; t) pattern=$OPTARG ;; *) usage ;; esac
done
shift $((OPTIND - 1))
(($# >= 2)) || usage
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
export BACKEND=nccl WORLD_SIZE=2 PYTHONWARNINGS=ignore
unset MASTER_PORT RANK

suite() { # LIBRARY LOG SECONDS ARGUMENTS...
    local library=$1 log=$2 seconds=$3
    shift 3
    # Each part has its own files and its own group of processes, so that a limit ends all of them.
    LD_PRELOAD=$library timeout -k 10 "$seconds" python3 "$here/torch_suite.py" "$@" > "$log" 2>&1 < /dev/null || true
}

# The last word about each test: one that began and did not end counts as not run.
ends() { # ALL-NAMES LOGS...
    local all=$1
    shift
    cat "$@" | awk -v all="$all" '
        BEGIN { while ((getline name < all) > 0) { names[++n] = name; end[name] = "not run" } }
        $1 == "begin" && ($2 in end) { end[$2] = "FAILED no end within the limit" }
        ($1 == "passed" || $1 == "FAILED" || $1 == "skipped") {
            name = $2; sub(/:$/, "", name)
            if (name in end) { end[name] = $1; why[name] = $0 }
        }
        END { for (i = 1; i <= n; i++) print end[names[i]] "\t" names[i] "\t" why[names[i]] }'
}

timeout 300 python3 "$here/torch_suite.py" --list > "$out/names.txt" 2> "$out/names.log" ||
    { echo "FAILED torch_suite.py --list: $(tail -n 1 "$out/names.log")"; exit 1; }
{ grep '^test_' "$out/names.txt" | grep -E "$pattern"; } > "$out/names.new" && mv "$out/names.new" "$out/names.txt"
for pair in "$@"; do
    [[ $pair = *=* ]] || usage
    name=${pair%%=*} library=${pair#*=} begin=$SECONDS
    rm -f "$out/$name".*
    for ((part = 0; part < jobs; part++)); do
        suite "$library" "$out/$name.$part.log" "$limit" --only "$(paste -sd, "$out/names.txt")" --part "$part" --parts "$jobs" &
    done
    wait
    ends "$out/names.txt" "$out/$name".*.log > "$out/$name.txt"
    again=$(awk -F'\t' '$1 != "passed" && $1 != "skipped" { print $2 }' "$out/$name.txt" | paste -sd,)
    left=$((limit - (SECONDS - begin)))
    if [[ -n $again ]] && ((left > 30)); then
        suite "$library" "$out/$name.z-again.log" "$left" --only "$again"
        ends "$out/names.txt" "$out/$name".*.log > "$out/$name.txt"
    fi
    echo "$name: $(cut -f 1 "$out/$name.txt" | sort | uniq -c | awk '{ $1 = $1; printf "%s%s", sep, $0; sep = ", " }'), in $((SECONDS - begin)) s"
done

first=${1%%=*} failed=0
: > "$out/compare.txt"
for pair in "${@:2}"; do
    name=${pair%%=*}
    # Both files list the same tests in the same order.
    paste -d '\t' "$out/$first.txt" "$out/$name.txt" | awk -F'\t' -v a="$first" -v b="$name" '
        $1 != $4 { print $2 ": " a " " $1 ", " b " " $4 (($4 ~ /^FAILED/) ? " (" $6 ")" : "") }' >> "$out/compare.txt"
    if paste -d '\t' "$out/$first.txt" "$out/$name.txt" | awk -F'\t' '$1 == "passed" && $4 != "passed" { found = 1 } END { exit !found }'; then
        failed=1
    fi
done
cat "$out/compare.txt"
grep -q '^passed' "$out/$first.txt" || { echo "FAILED: no test passes over $first"; exit 1; }
if ((failed)); then echo "FAILED: tests above pass over $first alone"; exit 1; fi
echo "ok: every test that passes over $first passes over the others"

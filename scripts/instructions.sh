#!/usr/bin/env bash
# Counts the instructions of short calls under valgrind's callgrind, which counts and does not time, and compares them with the
# recorded ones: a call may take 3 % more.
#
#   scripts/instructions.sh            exit code 1 if a case takes more
#   scripts/instructions.sh record     keeps what is counted, in lib/benches/instructions.csv
#
# A case is a place and a size of lib/benches/instructions.rs; a round is a reduce and a broadcast on two ranks, made by one thread.
# Built with the profile of tests, which CI has built anyway: compare the counts with each other alone. Another release of Rust counts
# otherwise, so the file names the one that it was recorded with. Exit code 77: no valgrind here (scripts/setup.sh --valgrind).
set -eu -o pipefail
cd "$(dirname "$0")/.."
record=lib/benches/instructions.csv
case ${1-} in
    "" | record) ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" && exit 2 ;;
esac
command -v valgrind >/dev/null || { echo "instructions: SKIPPED: no valgrind here: scripts/setup.sh --valgrind" >&2 && exit 77; }

program=$(cargo test -q --locked --workspace --bench instructions --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\/instructions-[^"]*\)".*/\1/p' | tail -n 1)
[[ -x $program ]] || { echo "instructions: the bench was not built" >&2 && exit 1; }

# counted CASE ROUNDS: instructions of the rounds.
counted() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect='*all_reduces*' "$program" "$1" "$2" 2>&1 |
        sed -n 's/.*Collected : \([0-9]*\).*/\1/p'
}

rust=$(rustc --version | cut -d ' ' -f 2)
[[ ${1-} = record ]] && printf 'case,instructions per round (rustc %s)\n' "$rust" >"$record"
grep -q "rustc $rust" "$record" || echo "instructions: note: $record was recorded with another rustc than $rust" >&2
status=0
for name in inproc-8 inproc-64K inproc-group region-8 shm-8 shm-64K tcp-8; do
    few=$(counted $name 100) many=$(counted $name 300)
    each=$(((many - few) / 200))
    if [[ ${1-} = record ]]; then
        echo "$name,$each" >>"$record"
        echo "$name: $each"
        continue
    fi
    before=$(sed -n "s/^$name,//p" "$record")
    awk -v name=$name -v now=$each -v before="${before:-0}" 'BEGIN {
        bad = now > before * 1.03
        printf "%s: %d instructions per round, recorded %d (%+.1f %%)%s\n", name, now, before, (now / before - 1) * 100, bad ? ": FAILED" : ""
        exit bad }' || status=1
done
exit $status

#!/usr/bin/env bash
# A learner's path, walked: runs the commands of a section of docs/book/src/topics/paths.md in their order and prints a table with
# status and seconds. Questions get no answer, so nothing is asked for ever.
#
#   scripts/walk.sh ten|evening|week|monday
#
# Works in learn-test-walk/ and target/walk/, and removes both at the end. Exit status: 0 every command ended as the page says (a
# comment "status N", else 0; 77 where this machine lacks something), 1 one did not, 2 usage.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 1
case ${1-} in
    ten) section='Ten minutes' ;;
    evening) section='One evening' ;;
    week) section='One week' ;;
    monday) section='Interview on Monday' ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" >&2 && exit 2 ;;
esac
export TINYNCCL_LEARN=learn-test-walk
[[ ! -e $TINYNCCL_LEARN ]] || { echo "walk: $TINYNCCL_LEARN is there already: remove it" >&2; exit 1; }
out=target/walk
mkdir -p "$out"
trap 'rm -rf "$TINYNCCL_LEARN" "$out"' EXIT

commands=$(awk -v section="## $section" '/^## /{on = $0 == section} /^```/{code = on && $0 == "```sh"; next} code' docs/book/src/topics/paths.md)
[[ $commands ]] || { echo "walk: no commands under '$section'" >&2; exit 1; }
wrong=0
printf '| command | seconds | status | lines |\n|---|---|---|---|\n'
while IFS= read -r line; do
    command=$(sed 's/ *# .*//' <<<"$line")
    expected=$(sed -n 's/.*# status \([0-9]*\).*/\1/p' <<<"$line")
    # Files that a command writes are the reader's; here they go where they are removed.
    run=$(sed -E "s#(--output|--sheet) #\1 $out/#" <<<"$command")
    start=$EPOCHREALTIME
    timeout 1800 bash -c "$run" </dev/null >"$out/log" 2>&1
    status=$?
    seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN {printf "%.1f", b - a}')
    printf '| `%s` | %s | %s | %s |\n' "$command" "$seconds" "$status" "$(wc -l <"$out/log")"
    if [[ $status != "${expected:-0}" && $status != 77 ]]; then
        wrong=1
        echo "walk: FAILED: expected status ${expected:-0}; the end of its output:"
        tail -n 25 "$out/log"
    fi
done <<<"$commands"
exit $wrong

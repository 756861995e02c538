#!/usr/bin/env bash
# Tests scripts/rxe-vm.sh by running it: eight machines, one to two minutes. Needs what rxe-vm.sh needs.
#
#   scripts/rxe-vm-test.sh
#
# Exit code: 0 all hold, 1 something does not, 77 a machine cannot be run here.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 1
vm=scripts/rxe-vm.sh
$vm --setup-only || exit $?
work=$(mktemp -d target/rxe-vm-test.XXXXXX) || exit 1
trap 'rm -rf "$work"' EXIT

failures=0
# check WHAT CONDITION...: CONDITION is a command.
check() {
    local what=$1
    shift
    if "$@"; then
        echo "ok: $what"
    else
        echo "FAILED: $what"
        failures=$((failures + 1))
    fi
}
equal() { [[ $1 == "$2" ]] || { echo "  expected '$2', got '$1'" && return 1; }; }
# has TEXT PATTERN
has() { grep -q -E "$2" <<<"$1" || { printf "  nothing like '%s' in:\n%s\n" "$2" "$(tail -n 15 <<<"$1")" && return 1; }; }

# --- the command's output, exit code, files and surroundings
head -c 1048576 /dev/urandom >"$work/random"
cat >"$work/surroundings" <<'END'
cat "$1"
echo "to stderr" >/dev/stderr
touch Cargo.toml.new && echo "writable root"
{ mount -o remount,rw / && touch Cargo.toml.new && echo "writable root after remount"; } >&2
{ pwd; echo "$TINYNCCL_TEST_OF_VM"; echo "$CARRIED"; echo "$RXE_VM"; ulimit -l; } >"$OUT/seen"
touch "$TMPDIR/x" || echo "no TMPDIR" >&2
sleep 1000 & # left behind: must keep nothing waiting
exit 3
END
TINYNCCL_TEST_OF_VM='a b "c"' CARRIED=yes $vm --env CARRIED --out "$work/out 1" \
    bash "$work/surroundings" "$work/random" >"$work/stdout" 2>"$work/stderr"
check "exit code 3" equal $? 3
check "1 MiB of random bytes come back through stdout, and nothing else" cmp "$work/random" "$work/stdout"
check "stderr is apart" has "$(<"$work/stderr")" '^to stderr$'
check "the host's files are read-only" has "$(<"$work/stderr")" 'Read-only file system'
check "also after a remount" equal "$(grep -c 'writable root' "$work/stderr")$([[ -e Cargo.toml.new ]] && echo file)" 0
check "folder, environment, device and limit in the guest, through \$OUT" equal "$(<"$work/out 1/seen")" \
    "$PWD"$'\na b "c"\nyes\nsingle\nunlimited'
check "TMPDIR is writable" equal "$(grep -c 'no TMPDIR' "$work/stderr")" 0

# --- two at a time, each with its own $OUT
# shellcheck disable=SC2016 # the guest expands it
$vm --no-device --out "$work/a" sh -c 'echo a >"$OUT/name"; exit 77' 2>/dev/null &
first=$!
# shellcheck disable=SC2016
$vm --no-device --out "$work/b" sh -c 'echo b >"$OUT/name"; kill -KILL $$' 2>/dev/null
check "a command killed by signal 9 gives 137" equal $? 137
wait $first
check "exit code 77, beside another machine" equal $? 77
check "each wrote its own \$OUT" equal "$(cat "$work"/[ab]/name | tr '\n' ' ')" 'a b '

# --- the end of time, and of the guest
said=$($vm --no-device --timeout 25 sh -c 'echo started; sleep 1000' 2>&1)
check "exit code 124 when the time is over" equal $? 124
check "it says so, after the command's output" has "$said" 'rxe-vm: timed out after 25 s'
check "output until then is there" has "$said" '^started$'
said=$($vm --no-device sh -c 'echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger' 2>&1)
check "exit code 125 when the guest dies" equal $? 125
check "with the guest's last words" has "$said" 'rxe-vm: .*Kernel panic'

# --- triangle: six devices, each pair talks
cat >"$work/triangle" <<'END'
for link in ab:ba bc:cb ca:ac; do
    for way in "" -e; do
        bash scripts/rxe-vm/pingpong.sh "rxe_${link%:*}" "rxe_${link#*:}" $way | grep '1000 iters'
    done
done
rdma link
cat /sys/class/infiniband/*/ports/1/gids/1
END
said=$($vm --triangle bash "$work/triangle" 2>&1)
check "triangle: exit code 0" equal $? 0
check "triangle: six active devices" equal "$(grep -c 'state ACTIVE' <<<"$said")" 6
check "triangle: six IPv4 GIDs" equal "$(grep ':ffff:0a01:' <<<"$said" | sort | tr -d '\n' | sed 's/0000:0000:0000:0000:0000:ffff:0a01:/ /g')" \
    " 0c01 0c02 1702 1703 1f01 1f03"
check "triangle: each pair talks, polling and with events" equal "$(grep -c '^1000 iters' <<<"$said")" 6

# --- loss, delay and the limit of locked memory
cat >"$work/loss" <<'END'
ulimit -l
bash scripts/rxe-vm/pingpong.sh rxe_ab rxe_ba -n 50
tc -s qdisc show dev ab
ibv_rc_pingpong -d rxe_ab -g 1 -s 4000000
END
said=$($vm --pair --loss 10 --delay 1.5 --memlock 1000 --mtu 1500 bash "$work/loss" 2>&1)
check "netem is as asked for" has "$said" 'netem.*delay 1.5ms loss 10%'
check "packets are lost" has "$said" 'dropped [1-9]'
check "RDMA repeats what was lost" has "$said" '^50 iters'
check "the limit of locked memory is set" has "$said" '^1000$'
check "and holds: a larger region cannot be registered" has "$said" "Couldn't register MR"

# --- wrong usage
for wrong in '' '--loss 5 true' '--loss x --pair true' '--nonsense true' '--out'; do
    # shellcheck disable=SC2086 # words
    $vm $wrong 2>/dev/null
    check "exit code 2 for '$wrong'" equal $? 2
done

if ((failures)); then
    echo "rxe-vm-test: $failures FAILED"
    exit 1
fi
echo "rxe-vm-test: all ok"

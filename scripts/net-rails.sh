#!/usr/bin/env bash
# How fast connections with several rails are, what a rail costs that dies, and what relays cost: network namespaces are
# nodes, and cables have the rates that `tc` gives them.
#
#   scripts/net-rails.sh [ROUNDS [connections|ranks]]      each row ROUNDS times (3), and the median
#
# The first part is connections of `tinynccl::transport::rails`. The second one is all_reduce of two ranks over TCP and over rails
# (TINYNCCL_TCP_RAILS), and of three over TCP, with a cable between each two or on a line. Without a second word both run.
# Needs unshare, ip and tc, and user namespaces where it is not run by root. Rates are megabits per second; the column
# `of` compares with the sum of the cables' rates.
set -eu -o pipefail
cd "$(dirname "$0")/.."
if [[ ${1-} == -* ]]; then sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; fi
rounds=${1:-3} part=${2:-all}
if [[ -z ${NET_RAILS_INSIDE-} ]]; then
    cargo build -q --release --locked --no-default-features -p perf -p allreduce-tcp
    export NET_RAILS_INSIDE=1
    exec unshare -Urn "$0" "$rounds" "$part"
fi
perf=$PWD/target/release/perf
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work" "$work".*' EXIT

# Nodes a to d: processes that keep their networks.
declare -A node
for name in a b c d; do
    unshare -n sleep 3600 &
    node[$name]=$!
done
for name in a b c d; do
    until [[ $(readlink "/proc/${node[$name]}/ns/net") != "$(readlink /proc/self/ns/net)" ]]; do :; done
done
within() { nsenter -t "${node[$1]}" -n "${@:2}"; }
plan=("a b 1" "a b 2" "b c 3" "c a 4" "c d 5" "d a 6")
for cable in "${plan[@]}"; do
    read -r one two number <<<"$cable"
    ip link add name "r$number" netns "${node[$one]}" type veth peer name "r$number" netns "${node[$two]}"
    within "$one" ip addr add "10.0.$number.1/30" dev "r$number"
    within "$two" ip addr add "10.0.$number.2/30" dev "r$number"
done

# cable NUMBER RATE: both ends of a cable of the plan; 0 takes it away.
cable() {
    local one two number
    for line in "${plan[@]}"; do
        read -r one two number <<<"$line"
        [[ $number == "$1" ]] || continue
        for end in $one $two; do
            if [[ $2 == 0 ]]; then
                within "$end" ip link set "r$1" down
            elif [[ $2 == unlimited ]]; then
                within "$end" ip link set "r$1" up
                within "$end" tc qdisc del dev "r$1" root 2>/dev/null || true
            else
                within "$end" ip link set "r$1" up
                within "$end" tc qdisc replace dev "r$1" root tbf rate "$2mbit" burst 256kb latency 20ms
            fi
        done
    done
}
cables() {
    local number=1
    for rate in "$@"; do
        cable $number "$rate"
        number=$((number + 1))
    done
    # The kernel takes a moment to see that both ends are plugged in.
    for end in "a r1" "b r1" "a r2" "b r2" "b r3" "c r3" "c r4" "a r4" "c r5" "d r5" "d r6" "a r6"; do
        read -r name port <<<"$end"
        if within "$name" ip -o link show "$port" | grep -q ',UP'; then
            until within "$name" ip -o link show "$port" | grep -q 'state UP'; do :; done
        fi
    done
}

# flows SECONDS "FROM TO"...: all at once; the sum of their MB/s and the longest of their pauses.
flows() {
    local seconds=$1 from to pids=()
    shift
    rm -f "$work"/*
    for flow in "$@"; do
        read -r from to <<<"$flow"
        within "$to" "$perf" net receive >"$work/$from$to" 2>"$work/$from$to.log" &
        pids+=($!)
        until [[ -s $work/$from$to ]]; do
            kill -0 "$!" 2>/dev/null || { cat "$work/$from$to.log" >&2; exit 1; }
        done
    done
    for flow in "$@"; do
        read -r from to <<<"$flow"
        within "$from" "$perf" net send "$(head -n 1 "$work/$from$to")" "$seconds" 2>>"$work/$from$to.log" &
        pids+=($!)
    done
    wait "${pids[@]}"
    cat "$work"/?? | awk '/MB/ { sum += $1; if ($5 > most) most = $5 } END { print sum, most }'
}

median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }

# row TEXT SUM COMMAND...: runs it in all rounds. SUM: megabits per second of its cables.
row() {
    local text=$1 sum=$2
    shift 2
    : >"$work.rows"
    for ((round = 0; round < rounds; round++)); do "$@" >>"$work.rows"; done
    local speed pause
    speed=$(awk '{ print $1 * 8 }' "$work.rows" | median)
    pause=$(awk '{ print $2 }' "$work.rows" | median)
    printf '%-44s %8.0f %6s %10.1f\n' "$text" "$speed" \
        "$(awk -v s="$speed" -v all="$sum" 'BEGIN { if (all) printf "%.2f", s / all; else print "-" }')" "$pause"
    rm -f "$work.rows"
}

# A cable is cut in the middle of a run, and comes back if a second time is given.
cut_after() {
    local seconds=$1 after=$2 back=${3-}
    (sleep "$after"; cable 2 0; [[ -z $back ]] || { sleep "$back"; cable 2 1000; }) &
    local cutter=$!
    flows "$seconds" "a b"
    wait "$cutter"
    cable 2 1000
}

# ping FROM TO: microseconds that 8 bytes take, the median.
ping() {
    rm -f "$work"/*
    mkfifo "$work/1" "$work/2"
    within "$1" "$perf" net ping <"$work/1" >"$work/from" &
    local pids=($!)
    within "$2" "$perf" net ping <"$work/2" >"$work/to" &
    pids+=($!)
    exec {one}>"$work/1" {two}>"$work/2"
    until [[ -s $work/from && -s $work/to ]]; do :; done
    cat "$work/to" >&$one
    cat "$work/from" >&$two
    wait "${pids[@]}"
    exec {one}>&- {two}>&-
    awk '/us/ { print $1 }' "$work/from"
}

# pings TEXT FROM TO: the median of all rounds.
pings() {
    for ((round = 0; round < rounds; round++)); do ping "$2" "$3"; done | median |
        awk -v text="$1" '{ printf "%-44s %8.1f us\n", text, $1 }'
}

# relays NODE...: processes there that relay, until the end.
relays() {
    for name in "$@"; do
        mkfifo "$work.$name"
        within "$name" "$perf" net relay <"$work.$name" >"$work.$name.out" &
        exec {hold}>"$work.$name"
        until [[ -s $work.$name.out ]]; do kill -0 "$!" || exit 1; done
    done
}

connections() {
    printf '%-44s %8s %6s %10s\n' 'a to b, 1 MiB, 8 under way' 'Mbit/s' of 'pause, ms'
    cables 1000 0 0 0
    row 'one cable of 1000' 1000 flows 3 "a b"
    cables 500 0 0 0
    row 'one cable of 500' 500 flows 3 "a b"
    cables 1000 1000 0 0
    row 'two of 1000' 2000 flows 3 "a b"
    cables 1000 500 0 0
    row 'one of 1000, one of 500' 1500 flows 3 "a b"
    cables 1000 100 0 0
    row 'one of 1000, one of 100' 1100 flows 3 "a b"
    cables 1000 1000 0 0
    row 'two of 1000, one cut after 1 of 3 s' 0 cut_after 3 1
    row 'the same, back after 2 of 8 s' 0 cut_after 8 1 1
    cables 1000 0 1000 1000
    row 'triangle of 1000: all six ways at once' 6000 flows 3 "a b" "b a" "b c" "c b" "c a" "a c"
    cables 1000 0 1000 0 1000
    relays b c
    row 'line of 1000: a to c, through b' 1000 flows 3 "a c"
    row 'line of 1000: a to d, through b and c' 1000 flows 3 "a d"
    row 'line of 1000: a and c, both ways at once' 2000 flows 3 "a c" "c a"
    cables 1000 0 1000 0 1000 1000
    relays d
    row 'ring of 1000: a to c, through b and d' 2000 flows 3 "a c"
    cable 6 0
    cables unlimited 0 unlimited 0 unlimited
    row 'no limit: a to b' 0 flows 3 "a b"
    row 'no limit: a to c, through b' 0 flows 3 "a c"
    row 'no limit: a to d, through b and c' 0 flows 3 "a d"
    pings '8 bytes: a to b' a b
    pings '8 bytes: a to c, through b' a c
    pings '8 bytes: a to d, through b and c' a d
}

# all_reduce RAILS NODE@ADDRESS...: a rank on each node, which finds rank 0 at that address; the microseconds of each size.
sizes=8,1K,32K,256K,1M,16M
all_reduce() {
    local rails=$1 rank=0 place pids=()
    shift
    for place; do
        within "${place%@*}" env RANK=$rank WORLD_SIZE=$# LOCAL_RANK=0 MASTER_ADDR="${place#*@}" MASTER_PORT=29501 TINYNCCL_TUNE=off \
            TINYNCCL_SECRET=of-this-measurement TINYNCCL_TCP_RAILS="$rails" "$PWD/target/release/allreduce-tcp" --bytes $sizes \
            --iters 10 >"$work/rank$rank" &
        pids+=($!)
        rank=$((rank + 1))
    done
    wait "${pids[@]}"
    awk -F'|' '$1 + 0 > 0 && NF > 3 { split($3, ring, " "); print $1 + 0, ring[1] }' "$work/rank0"
}

pair() { all_reduce "$1" a@10.0.1.1 b@10.0.1.1; }

# three RATE: rank 0 in the middle of a line, whose ends have a cable of this rate, or none.
three() {
    cable 4 "$1"
    # The kernel takes a moment to see both ends, or that one is gone.
    for end in a c; do
        until within $end ip -o link show r4 | grep -q "state $([[ $1 == 0 ]] && echo DOWN || echo UP)"; do :; done
    done
    all_reduce 0 b@10.0.1.2 a@10.0.1.2 c@10.0.3.1
}

# compare TEXT ONE OTHER: two commands in turn, a row for each size.
compare() {
    local way
    : >"$work.times"
    for ((round = 0; round < rounds; round++)); do
        for way in "$2" "$3"; do $way | sed "s/^/${way// /-} /" >>"$work.times"; done
    done
    for bytes in $(awk '{ print $2 }' "$work.times" | sort -nu); do
        local one other
        one=$(awk -v b="$bytes" -v w="${2// /-}" '$1 == w && $2 == b { print $3 }' "$work.times" | median)
        other=$(awk -v b="$bytes" -v w="${3// /-}" '$1 == w && $2 == b { print $3 }' "$work.times" | median)
        printf '%-24s %10s %13.1f %10.1f %6s\n' "$1" "$bytes" "$one" "$other" \
            "$(awk -v t="$one" -v r="$other" 'BEGIN { printf "%.2f", t / r }')"
    done
    rm -f "$work.times"
}

ranks() {
    for node in a b c; do within $node ip link set lo up; done
    printf '%-24s %10s %13s %10s %6s\n' 'two ranks, cables' bytes 'TCP, us' 'rails, us' ratio
    cables 1000 1000 0 0
    compare '1000 and 1000' 'pair 0' 'pair 1'
    cables 1000 500 0 0
    compare '1000 and 500' 'pair 0' 'pair 1'
    cables unlimited unlimited 0 0
    compare 'no limit' 'pair 0' 'pair 1'
    printf '%-24s %10s %13s %10s %6s\n' 'three ranks, TCP' bytes 'triangle, us' 'line, us' ratio
    for rate in 1000 unlimited; do
        cables $rate 0 $rate $rate
        compare "$rate" "three $rate" 'three 0'
    done
}

case $part in
    all) connections; ranks ;;
    connections | ranks) $part ;;
    *) echo "expected connections or ranks, got $part" >&2; exit 2 ;;
esac

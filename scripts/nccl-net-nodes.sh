#!/usr/bin/env bash
# NVIDIA's NCCL over our network plugin (docs/nccl-net.md) between nodes that have no network in common for data.
# Network namespaces of one machine are nodes, each with one of its GPUs; veth pairs are cables, each with a subnet of
# its own. NCCL takes the nodes for hosts, and first meets over a network that routes between all of them. The counters
# of the interfaces show which way the data went.
#
#   scripts/nccl-net-nodes.sh [-l PLUGIN] [-n NCCL] [-t TOPOLOGIES] OUT
#
#   -l  the plugin, default target/release/libnccl_net_tinynccl.so (cargo build --release -p tinynccl-nccl-net)
#   -n  NVIDIA's library, to preload; default: the one that PyTorch loads
#   -t  comma-separated; default all that the GPUs suffice for:
#         triangle  three nodes, a cable for each pair
#         line      four nodes (three with three GPUs): a message between the ends passes one or two relays
#         ring      four nodes: opposite ones have two ways of one relay each
#         rails     two nodes with two cables
#         cut       the same; a cable is cut in the middle of a run and comes back
#         train     rails: the GPT of milestone 12 by DDP, beside NCCL's sockets on the other network: the same weights
#
# Needs PyTorch, ip, unshare and nsenter, user namespaces where it is not run by root; `train` also the Python package
# (scripts/python-tests.sh builds it) in PYTHONPATH. OUT gets a log per rank. Exit status 1 if a value was wrong, a run
# failed or data went another way; 77 where something that it needs is not here.
set -eu -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
plugin=$here/../target/release/libnccl_net_tinynccl.so nccl='' topologies=''
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0" >&2; exit 2; }
missing() { echo "nccl-net-nodes: cannot run here: $*" >&2; exit 77; }
arguments=("$@")
while getopts l:n:t: option; do
    case $option in l) plugin=$OPTARG ;; n) nccl=$OPTARG ;; t) topologies=$OPTARG ;; *) usage ;; esac
done
shift $((OPTIND - 1))
(($# == 1)) || usage
out=$1

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
((gpus >= 2)) || missing "$gpus NVIDIA GPUs, and it takes 2"
for command in ip unshare nsenter python3; do command -v $command >/dev/null || missing "no $command"; done
python3 -c 'import torch' 2>/dev/null || missing "no PyTorch"
[[ -f $plugin ]] || missing "no plugin at $plugin: cargo build --release -p tinynccl-nccl-net"
plugin=$(realpath "$plugin")
if [[ -z ${NCCL_NET_NODES_INSIDE-} ]]; then
    unshare -Urn ip link add name x type veth peer name y 2>/dev/null || missing "no user namespaces or no veth devices"
    NCCL_NET_NODES_INSIDE=1 exec unshare -Urn "$0" "${arguments[@]}"
fi
if [[ -z $topologies ]]; then
    topologies=rails,cut,train
    ((gpus < 3)) || topologies+=,triangle,line
    ((gpus < 4)) || topologies+=,ring
fi
mkdir -p "$out"
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT

declare -A node
within() { nsenter -t "${node[$1]}" -n "${@:2}"; }

# nodes COUNT CABLE...: nodes 0, 1, ...; a cable is the numbers of two nodes. A hub, which is no node, routes between
# all of them by their interface `meet`.
nodes() {
    local count=$1 name number=0 one two
    shift
    for name in ${node[@]+"${!node[@]}"}; do kill "${node[$name]}" 2>/dev/null || true; done
    node=()
    for name in hub $(seq 0 $((count - 1))); do
        unshare -n sleep 3600 &
        node[$name]=$!
        until [[ $(readlink "/proc/$!/ns/net") != "$(readlink /proc/self/ns/net)" ]]; do :; done
        within "$name" ip link set lo up
    done
    within hub sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
    for name in $(seq 0 $((count - 1))); do
        ip link add name "node$name" netns "${node[hub]}" type veth peer name meet netns "${node[$name]}"
        within hub ip addr add "10.9.$name.1/30" dev "node$name"
        within hub ip link set "node$name" up
        within "$name" ip addr add "10.9.$name.2/30" dev meet
        within "$name" ip link set meet up
        within "$name" ip route add 10.9.0.0/16 via "10.9.$name.1"
    done
    for cable in "$@"; do
        read -r one two <<<"$cable"
        number=$((number + 1))
        ip link add name "cable$number" netns "${node[$one]}" type veth peer name "cable$number" netns "${node[$two]}"
        local end=1
        for name in "$one" "$two"; do
            within "$name" ip addr add "10.0.$number.$end/30" dev "cable$number"
            within "$name" ip link set "cable$number" up
            end=2
        done
    done
    for name in $(seq 0 $((count - 1))); do
        # The kernel takes a moment to see that both ends are plugged in.
        until ! within "$name" ip -o link show | grep -v ' lo:' | grep -qv 'state UP'; do :; done
    done
}

# carried NODE INTERFACE: megabytes that left it. Of `ip`, because /sys shows the interfaces of its own network alone.
carried() { echo $(($(within "$1" ip -s link show dev "$2" | awk '/TX:/ { getline; print $1 }') / 1000000)); }

# Takes cable 2 away for two seconds once data has passed over it.
cut_and_mend() {
    until (($(carried 0 cable2) > 100)); do sleep 0.1; done
    within 0 ip link set cable2 down
    sleep 2
    within 0 ip link set cable2 up
}

# ranks CASE COUNT WAY COMMAND...: the command on every node. WAY is plugin or sockets.
ranks() {
    local case=$1 count=$2 way=$3 rank pids=() failed=0 with
    shift 3
    rm -f "$work/store"
    for ((rank = 0; rank < count; rank++)); do
        with=("RANK=$rank" "WORLD_SIZE=$count" "LOCAL_RANK=$rank" "INIT_METHOD=file://$work/store" "NCCL_HOSTID=node$rank"
            NCCL_SOCKET_IFNAME=meet NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET)
        [[ -z $nccl ]] || with+=("LD_PRELOAD=$nccl")
        if [[ $way = plugin ]]; then
            with+=("NCCL_NET_PLUGIN=$plugin" TINYNCCL_IFNAME=cable)
        else
            with+=(NCCL_NET=Socket NCCL_NET_PLUGIN=none)
        fi
        nsenter -t "${node[$rank]}" -n env "${with[@]}" timeout -k 5 120 "$@" >"$out/$case.$way.$rank.log" 2>&1 &
        pids+=($!)
    done
    for rank in "${!pids[@]}"; do
        wait "${pids[rank]}" || { echo "FAILED $case: rank $rank over $way ended with $?: $out/$case.$way.$rank.log" && failed=1; }
    done
    return $failed
}

failures=0
fail() { echo "FAILED $*"; failures=1; }

# topology NAME COUNT CABLE...: exact values of every collective and all pairs, then what each cable carried.
topology() {
    local name=$1 count=$2 number=0 one two both met=0 carried=0
    shift 2
    nodes "$count" "$@"
    local cutter='' more=()
    if [[ $name = cut ]]; then
        cut_and_mend &
        cutter=$! more=(--seconds 8)
    fi
    ranks "$name" "$count" plugin python3 "$here/nccl/nodes.py" ${more[@]+"${more[@]}"} || failures=1
    if [[ -n $cutter ]]; then
        kill "$cutter" 2>/dev/null && fail "cut: cable 2 was not cut and mended within the run"
        grep -hq 'is back, as stream' "$out"/cut.plugin.*.log || fail 'cut: no line says "is back"'
    fi
    grep -v NCCL "$out/$name.plugin.0.log" | sed "s/^/$name: /" || true
    grep -hq 'via NET/tinynccl' "$out/$name.plugin.0.log" || fail "$name: NCCL does not say \"via NET/tinynccl\""
    for cable in "$@"; do
        read -r one two <<<"$cable"
        number=$((number + 1))
        both=$(($(carried "$one" "cable$number") + $(carried "$two" "cable$number")))
        echo "$name: cable $number, node $one to node $two: $both MB"
        carried=$((carried + both))
        ((both > 10)) || fail "$name: cable $number carried nothing"
    done
    for ((number = 0; number < count; number++)); do met=$((met + $(carried "$number" meet))); done
    echo "$name: the network where they meet: $met MB"
    ((met * 50 < carried)) || fail "$name: data went over the network where they meet"
}

for topology in ${topologies//,/ }; do
    case $topology in
        rails) topology rails 2 "0 1" "0 1" ;;
        triangle) topology triangle 3 "0 1" "1 2" "2 0" ;;
        ring) topology ring 4 "0 1" "1 2" "2 3" "3 0" ;;
        line)
            if ((gpus >= 4)); then topology line 4 "0 1" "1 2" "2 3"; else topology line 3 "0 1" "1 2"; fi
            grep -hq 'through relay' "$out"/line.plugin.*.log || fail "line: no connection says \"through relay\""
            ;;
        cut) topology cut 2 "0 1" "0 1" ;;
        train)
            nodes 2 "0 1" "0 1"
            for way in plugin sockets; do
                ranks train 2 $way python3 "$here/../milestones/12-pytorch-ddp/python/train.py" --model gpt --device cuda \
                    --backend nccl --against none --steps 200 || failures=1
                grep -v NCCL "$out/train.$way.0.log" | sed "s/^/train, $way: /"
            done
            words() { grep -o '^ *[0-9]* .* identical' "$out/train.$1.0.log"; }
            [[ -n $(words plugin) && $(words plugin) = "$(words sockets)" ]] || fail "train: other weights than over sockets"
            ;;
        *) usage ;;
    esac
done
((failures == 0)) && echo "all ok"
exit $failures

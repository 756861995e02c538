#!/bin/bash
# Second part of the guest, in the host's files: makes the network and the RDMA devices, runs the command, keeps its
# output and exit code. rxe-vm.sh copies this file into the run folder, which the guest sees at /run/rxe-vm:
#
#   job.sh           in: command, directory, environment, topology, loss, delay, mtu, memlock, terminal
#   stdout, stderr   out: what the command wrote, byte for byte, while it runs
#   status           out: the command's exit code (128 + N for signal N, as in a shell); absent if it never ran
#   problem          out: why the command could not be run
set -u
run=/run/rxe-vm
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
. $run/job.sh

fail() {
    echo "$*" | tee $run/problem
    exit 1
}

# Runs a command of the set-up; its own words are the reason when it fails.
must() {
    local said
    said=$("$@" 2>&1) || fail "'$*' failed: $said"
}

setting() { echo "$2" >"/proc/sys/net/ipv4/conf/$1" || fail "cannot set $1"; }

# end NETDEV ADDRESS: one end of a link, with its RDMA device. The address comes before "up", so that the GID table is
# the same every time: index 0 link-local, index 1 IPv4.
end() {
    must ip link set "$1" mtu "$mtu"
    must ip addr add "$2/24" dev "$1"
    must ip link set "$1" up
    if [ "$loss$delay" != 00 ]; then
        must tc qdisc add dev "$1" root netem limit 100000 loss "$loss%" delay "${delay}ms"
    fi
    must rdma link add "rxe_$1" type rxe netdev "$1"
    devices+=("rxe_$1")
}

# link A B SUBNET: netdevs AB and BA, node a is .1, b is .2, c is .3.
link() {
    local node=abc
    local host_a=${node%%"$1"*} host_b=${node%%"$2"*}
    must ip link add "$1$2" type veth peer name "$2$1"
    end "$1$2" "$3.$((${#host_a} + 1))"
    end "$2$1" "$3.$((${#host_b} + 1))"
}

# A device is ready when its port is active and its IPv4 GID is there.
wait_ready() {
    local device port tries
    for device in "${devices[@]}"; do
        port=/sys/class/infiniband/$device/ports/1
        for ((tries = 0; tries < 500; tries++)); do
            if grep -q ACTIVE "$port/state" && grep -q :ffff: "$port"/gids/[0-3]; then continue 2; fi
            sleep 0.01
        done
        fail "$device is not ready after 5 s: state $(cat "$port/state"), GIDs $(cat "$port"/gids/[0-3] | tr '\n' ' ')"
    done 2>/dev/null
}

network() {
    devices=()
    must ip link set lo up
    # All nodes are in one network namespace (Debian's 6.1 has rxe in the first one only). A packet to an address of
    # our own may then come in from outside (accept_local), by another way than the answer goes (rp_filter), and only
    # the netdev that has an address answers for it (arp_ignore).
    setting all/rp_filter 0
    setting default/rp_filter 0
    setting all/accept_local 1
    setting all/arp_ignore 1
    case $topology in
        single)
            must ip link add rxe0 type dummy
            must ip link set rxe0 mtu "$mtu"
            must ip addr add 10.1.1.1/24 dev rxe0
            must ip link set rxe0 up
            must rdma link add rxe0 type rxe netdev rxe0
            devices=(rxe0)
            ;;
        pair) link a b 10.1.12 ;;
        line) link a b 10.1.12 && link b c 10.1.23 ;;
        triangle) link a b 10.1.12 && link b c 10.1.23 && link c a 10.1.31 ;;
        none) return ;;
    esac
    wait_ready
}

# The command as asked for: its folder, environment and limits. Replaces the shell it runs in.
start() {
    cd "$directory" || exit 126
    if [ "$memlock" = unlimited ]; then
        ulimit -l unlimited
        exec env -i "${environment[@]}" "${command[@]}"
    fi
    # Root may lock any amount as long as it has the capability.
    ulimit -l "$memlock"
    exec env -i "${environment[@]}" setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "${command[@]}"
}

# Ends what the command left behind, so that the pipes of its output close.
end_leftovers() {
    local process keep=" 1 $$ $* "
    for process in /proc/[0-9]*; do
        process=${process#/proc/}
        # Kernel threads have no program.
        [[ $keep == *" $process "* ]] || [ ! -e "/proc/$process/exe" ] || kill -KILL "$process"
    done 2>/dev/null
}

network
echo "rxe-vm: devices ready at $(cut -d ' ' -f 1 /proc/uptime) s"
if [ "$terminal" = yes ]; then
    stty -F /dev/ttyS1 "$terminal_settings" rows "$terminal_rows" cols "$terminal_columns"
    (start) <>/dev/ttyS1 >&0 2>&0
    status=$?
else
    # Pipes, not the files themselves: a program then finds what it knows from a shell, and /dev/stderr works.
    must mkfifo /run/stdout /run/stderr
    cat </run/stdout >$run/stdout &
    copies=$!
    cat </run/stderr >$run/stderr &
    copies="$copies $!"
    (start) </dev/null >/run/stdout 2>/run/stderr
    status=$?
    end_leftovers $copies
    wait $copies
fi
echo "$status" >$run/status

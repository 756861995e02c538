#!/bin/bash
# Second part of the guest, in the host's files: makes the network and the RDMA devices, runs the command, keeps its
# output and exit code. rxe-vm.sh copies this file into the run folder, which the guest sees at /run/rxe-vm:
#
#   job.sh           in: command, directory, environment, topology, loss, delay, mtu, memlock, terminal
#   stdout, stderr   out: what the command wrote, byte for byte, while it runs
#   status           out: the command's exit code (128 + N for signal N, as in a shell); absent if it never ran
#   problem          out: why the command could not be run
# shellcheck disable=SC2154
set -u
run=/run/rxe-vm
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
# shellcheck disable=SC1091
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

# end NETDEV ADDRESS: one end of a link, with its RDMA device.
end() {
    ip_batch+="addr add $2/24 dev $1"$'\n'"link set $1 mtu $mtu up"$'\n'
    if [ "$loss$delay" != 00 ]; then
        tc_batch+="qdisc add dev $1 root netem limit 100000 loss $loss% delay ${delay}ms"$'\n'
    fi
    rdma_batch+="link add rxe_$1 type rxe netdev $1"$'\n'
    devices+=("rxe_$1")
}

# link A B SUBNET [N]: netdevs AB and BA, or ABN and BAN, node a is .1, b is .2, c is .3. The MAC addresses, and with them the link-local
# GIDs, are the same every time. Each end knows the other's: a lost ARP packet would fail ibv_modify_qp to RTR, before
# any RDMA packet.
link() {
    local nodes=abc of_a of_b mac_a mac_b ab=$1$2${4:-} ba=$2$1${4:-}
    of_a=${nodes%%"$1"*} of_b=${nodes%%"$2"*}
    of_a=$((${#of_a} + 1)) of_b=$((${#of_b} + 1))
    mac_a=$(printf '02:00:00:00:%02x:%02x' "${3##*.}" $of_a) mac_b=$(printf '02:00:00:00:%02x:%02x' "${3##*.}" $of_b)
    ip_batch+="link add $ab address $mac_a type veth peer name $ba address $mac_b"$'\n'
    end "$ab" "$3.$of_a"
    end "$ba" "$3.$of_b"
    ip_batch+="neigh add $3.$of_b lladdr $mac_b dev $ab nud permanent"$'\n'
    ip_batch+="neigh add $3.$of_a lladdr $mac_a dev $ba nud permanent"$'\n'
}

# All commands of a tool in one process: starting one takes a tenth of a second here.
batch() { [ ! "$2" ] || must "$1" -b - <<<"$2"; }

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
    devices=() ip_batch=$'link set lo up\n' tc_batch='' rdma_batch=''
    # All nodes are in one network namespace (Debian's 6.1 has rxe in the first one only). A packet to an address of
    # our own may then come in from outside (accept_local), by another way than the answer goes (rp_filter), and only
    # the netdev that has an address answers for it (arp_ignore).
    setting all/rp_filter 0
    setting default/rp_filter 0
    setting all/accept_local 1
    setting all/arp_ignore 1
    case $topology in
        single)
            ip_batch+=$'link add rxe0 address 02:00:00:00:01:01 type dummy\naddr add 10.1.1.1/24 dev rxe0\n'
            ip_batch+="link set rxe0 mtu $mtu up"$'\n'
            rdma_batch=$'link add rxe0 type rxe netdev rxe0\n'
            devices=(rxe0)
            ;;
        pair) link a b 10.1.12 ;;
        rails) link a b 10.1.12 && link a b 10.1.112 2 ;;
        line) link a b 10.1.12 && link b c 10.1.23 ;;
        triangle) link a b 10.1.12 && link b c 10.1.23 && link c a 10.1.31 ;;
    esac
    batch ip "$ip_batch"
    batch tc "$tc_batch"
    batch rdma "$rdma_batch"
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
read -r up _ </proc/uptime
echo "rxe-vm: devices ready at $up s"
if [ "$terminal" = yes ]; then
    stty -F /dev/ttyS1 "$terminal_settings" rows "$terminal_rows" cols "$terminal_columns"
    command=(setsid --ctty --wait "${command[@]}") # for job control and Ctrl-C
    (start) <>/dev/ttyS1 >&0 2>&0
    status=$?
else
    # Pipes, not the files themselves: a program then finds what it knows from a shell, and /dev/stderr works.
    must mkfifo /run/stdout /run/stderr
    cat </run/stdout >$run/stdout &
    copies=($!)
    cat </run/stderr >$run/stderr &
    copies+=($!)
    (start) </dev/null >/run/stdout 2>/run/stderr
    status=$?
    end_leftovers "${copies[@]}"
    wait "${copies[@]}"
fi
echo "$status" >$run/status

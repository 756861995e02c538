#!/bin/sh
# First process of the guest, run by busybox from the initramfs. Loads the modules, mounts the host's files and hands
# over to guest.sh in them. Everything it prints goes to the guest's console, never to the command's output.
#
# Shares (9p): "host" is the host's /, read-only; "run" holds what rxe-vm.sh and guest.sh tell each other; "out" is $OUT.
export PATH=/bin

stop() {
    # With -no-reboot and reboot=triple the machine ends at once, without the detour over ACPI.
    sync
    reboot -f
    sleep 60
}
fail() {
    echo "rxe-vm: guest: $*"
    stop
}
stage() { read -r up _ </proc/uptime && echo "rxe-vm: $1 at $up s"; }

mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t devtmpfs dev /dev || fail "no /proc, /sys or /dev"
stage "init"
while read -r module; do
    insmod "/modules/$module" || fail "cannot load $module"
done </modules/order

stage "modules loaded"
p9=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $p9,cache=loose,ro host /host || fail "cannot mount the host's files"
mount -t proc proc /host/proc && mount -t sysfs sysfs /host/sys && mount -o bind /dev /host/dev &&
    mount -t tmpfs run /host/run || fail "cannot mount into the host's files"
mkdir -p /dev/shm /dev/pts /host/run/rxe-vm /host/run/tmp
chmod 1777 /host/run/tmp
mount -t tmpfs shm /dev/shm && mount -o bind /dev/shm /host/dev/shm || fail "no /dev/shm"
mount -t devpts -o gid=5,mode=620,ptmxmode=666 pts /host/dev/pts || fail "no /dev/pts"
mount -t 9p -o $p9 run /host/run/rxe-vm || fail "cannot mount the run folder"
read -r out </host/run/rxe-vm/out-path
mount -t 9p -o $p9 out "/host$out" || fail "cannot mount \$OUT at $out"
hostname rxe-vm
stage "host files mounted"
chroot /host /bin/bash /run/rxe-vm/guest.sh || fail "guest.sh failed"
stage "done"
dmesg >/host/run/rxe-vm/dmesg
stop

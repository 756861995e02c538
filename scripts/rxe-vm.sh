#!/usr/bin/env bash
# Runs a command in a virtual machine with soft-RoCE (the kernel's rdma_rxe driver), for RDMA verbs without RDMA hardware.
#
#   scripts/rxe-vm.sh [OPTIONS] COMMAND [ARGUMENTS...]
#   scripts/rxe-vm.sh ibv_devinfo                  one RDMA device
#   scripts/rxe-vm.sh --triangle rdma link         three nodes, six devices
#   scripts/rxe-vm.sh bash                         a shell, when typed at a terminal
#
# The machine has the host's files read-only, so programs built or installed on the host run as they are, in the same
# folder. $OUT names the one folder of the host it can write to; $TMPDIR and /dev/shm are in its memory. The command runs
# as root, its stdin is /dev/null; stdout and stderr come back byte for byte while it runs, and its exit code is ours.
#
# Devices (one of):
#   --single       (default) rxe0 at 10.1.1.1. Packets from a device to itself never reach a network.
#   --pair         nodes a and b: rxe_ab 10.1.12.1, rxe_ba 10.1.12.2
#   --rails        as --pair, with a second link between the two: rxe_ab2 10.1.112.1, rxe_ba2 10.1.112.2
#   --line         a, b, c; b in the middle: as --pair, and rxe_bc 10.1.23.2, rxe_cb 10.1.23.3
#   --triangle     a, b, c: as --line, and rxe_ca 10.1.31.3, rxe_ac 10.1.31.1
#                  rxe_XY belongs to node X and is linked to node Y (a veth pair, netdevs XY and YX, one /24 per link).
#                  GID index 0 is link-local, 1 is the IPv4 address; both are RoCE v2.
#   --no-device    no network, no RDMA device
# Network:
#   --loss PERCENT drop packets at random, at both ends of every link; 0 to 100
#   --delay MS     delay packets, at both ends of every link (a round trip takes twice as long)
#   --mtu BYTES    of the netdevs, default 4200: the RDMA MTU is then 4096 (1500 gives 1024)
#                  These change only RDMA between devices: TCP between addresses of one machine takes its loopback, and
#                  ARP is not needed (neighbours are entered at the start).
# Machine:
#   --timeout S    for boot and command together, default 300 (3600 with a terminal)
#   --smp N        processors, default as many as the host has, at most 4
#   --mem SIZE     memory as QEMU writes it, default 1G
#   --memlock KIB  limit of locked memory of the command, which then runs without CAP_IPC_LOCK; default unlimited
#   --accel NAME   kvm or tcg (emulation); default: kvm if it can boot the machine, else tcg
# Command:
#   --out DIR      use DIR as $OUT and keep it. Default: a new folder, kept and named on stderr if something is in it
#   --env NAME[=V] carry an environment variable over. RUST_LOG, RUST_BACKTRACE and TINYNCCL_* always are.
#   --interactive  connect the terminal to the command (the default for a bare bash or sh typed at a terminal)
# Else:
#   --setup-only   prepare the kernel and try KVM, run nothing
#   --print        print the QEMU command line, run nothing
#
# In the guest, RXE_VM says single, pair, rails, line, triangle or none. A process that the command leaves behind is killed.
#
# Exit code: the command's own (128 + N if signal N ended it), or
#     2  wrong usage
#    77  a machine cannot be run here; says what is missing (scripts/setup.sh --verbs installs what can be installed)
#   124  the time is over
#   125  the machine ended before the command did, or could not make its devices
# A line "rxe-vm: ..." on stderr tells these from a command that has the same exit code.
#
# The kernel is Debian's package, downloaded once (70 MB), unpacked and never installed. It stays in target/rxe-vm, or
# $TINYNCCL_VM_CACHE. TINYNCCL_VM_KERNEL=DIR uses boot/vmlinuz* and lib/modules/* below DIR instead. To experiment:
# TINYNCCL_VM_ACCEL as --accel, TINYNCCL_VM_CPU as QEMU's -cpu, TINYNCCL_VM_APPEND for the kernel's command line.
# Needs x86-64 Linux. Root only for installing packages. Any number of these machines can run at a time.
set -u -o pipefail
shopt -s nullglob
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${TINYNCCL_VM_CACHE:-$here/../target/rxe-vm}

# What the guest needs, each after what it depends on is loaded; modprobe resolves the rest.
# vgem makes dmabufs (milestone 04): the kernel has no udmabuf and no dma-heap.
modules=(virtio_pci 9pnet_virtio 9p veth dummy sch_netem ib_uverbs rdma_ucm crc32_generic rdma_rxe vgem)
optional=" crc32_generic vgem " # built in or gone in later kernels

say() { printf 'rxe-vm: %s\n' "$*" >&2; }
die() {
    local code=$1
    shift
    say "$*"
    exit "$code"
}
cannot() { die 77 "cannot run here: $*"; }
usage() { die 2 "$*; see scripts/rxe-vm.sh --help"; }
have() { command -v "$1" >/dev/null 2>&1; }

# ---- options

topology=single loss=0 delay=0 mtu=4200 memlock=unlimited
timeout='' smp=$(($(nproc) < 4 ? $(nproc) : 4)) mem=1G accel=${TINYNCCL_VM_ACCEL:-auto}
out='' interactive=auto action=run carried=()

number() { [[ $2 =~ ^[0-9]+(\.[0-9]+)?$ ]] || usage "$1 takes a number, not '$2'"; }
whole() { [[ $2 =~ ^[0-9]+$ ]] || usage "$1 takes a whole number, not '$2'"; }

while (($#)); do
    case $1 in
        --loss | --delay | --mtu | --timeout | --smp | --mem | --memlock | --accel | --out | --env)
            (($# > 1)) || usage "$1 needs a value"
            ;;
    esac
    case $1 in
        --single | --pair | --rails | --line | --triangle) topology=${1#--} ;;
        --no-device) topology=none ;;
        --loss) number "$1" "$2" && loss=$2 && shift ;;
        --delay) number "$1" "$2" && delay=$2 && shift ;;
        --mtu) whole "$1" "$2" && mtu=$2 && shift ;;
        --timeout) number "$1" "$2" && timeout=$2 && shift ;;
        --smp) whole "$1" "$2" && smp=$2 && shift ;;
        --mem) mem=$2 && shift ;;
        --memlock) whole "$1" "$2" && memlock=$2 && shift ;;
        --accel) accel=$2 && shift ;;
        --out) out=$2 && shift ;;
        --env) carried+=("$2") && shift ;;
        --interactive) interactive=yes ;;
        --setup-only) action=setup ;;
        --print) action=print ;;
        -h | --help)
            sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --) shift && break ;;
        -*) usage "unknown option '$1'" ;;
        *) break ;;
    esac
    shift
done
[[ $action != run ]] || (($#)) || usage "no command given"
[[ $accel =~ ^(auto|kvm|tcg)$ ]] || usage "--accel takes kvm or tcg, not '$accel'"
if [[ $loss$delay != 00 && $topology =~ ^(single|none)$ ]]; then
    usage "--loss and --delay need a link: add --pair, --rails, --line or --triangle"
fi

# ---- what must be there

[[ $(uname -sm) = 'Linux x86_64' ]] || cannot "this is $(uname -sm), the machine needs Linux x86_64"
missing=()
for tool in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio depmod:kmod xz:xz-utils rdma:iproute2 \
    tc:iproute2 setpriv:util-linux flock:util-linux; do
    PATH=$PATH:/usr/sbin:/sbin have "${tool%:*}" || missing+=("${tool#*:}")
done
((${#missing[@]} == 0)) || cannot "not installed: ${missing[*]}; run scripts/setup.sh --verbs as root"
PATH=$PATH:/usr/sbin:/sbin
busybox=$(command -v busybox)
# A dynamically linked busybox finds no libraries in the initramfs.
if grep -q -a -F /ld-linux "$busybox"; then cannot "$busybox is not static: install busybox-static"; fi

mkdir -p "$cache" || cannot "cannot write to $cache; set TINYNCCL_VM_CACHE"
cache=$(cd "$cache" && pwd)

# ---- the kernel: $cache/PACKAGE with boot/ and lib/modules/, from Debian's package

kernel_package() { apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-/ { print $2; exit }'; }

fetch_kernel() {
    local package=$1 work
    local size
    size=$(apt-cache show --no-all-versions "$package" | awk '/^Size:/ { printf "%.1f MB", $2 / 1e6; exit }')
    say "downloading Debian's kernel package $package ($size) into $cache, once"
    work=$(mktemp -d "$cache/fetch.XXXXXX") || return 1
    # apt fetches as its own user, which may not write here.
    local as_user=()
    [[ $(id -u) != 0 ]] || as_user=(-o APT::Sandbox::User=root)
    if ! (cd "$work" && apt-get "${as_user[@]}" -q download "$package") >"$work/log" 2>&1; then
        # The package lists may be old, and the file they name gone.
        [[ $(id -u) != 0 ]] || apt-get -q update >>"$work/log" 2>&1
        (cd "$work" && apt-get "${as_user[@]}" -q download "$package") >>"$work/log" 2>&1 || {
            tail -n 5 "$work/log" >&2
            rm -rf "$work"
            return 1
        }
    fi
    # Only what a machine without hardware needs.
    mkdir "$work/root"
    dpkg-deb --fsys-tarfile "$work"/*.deb | tar -x -C "$work/root" --wildcards './boot/vmlinuz*' \
        '*/lib/modules/*/modules.*' '*/kernel/arch/*' '*/kernel/crypto/*' '*/kernel/lib/*' '*/kernel/net/*' \
        '*/kernel/fs/9p/*' '*/kernel/fs/configfs/*' '*/kernel/fs/netfs/*' '*/kernel/fs/fscache/*' '*/kernel/drivers/virtio/*' \
        '*/kernel/drivers/infiniband/*' '*/kernel/drivers/net/veth*' '*/kernel/drivers/net/dummy*' \
        '*/kernel/drivers/gpu/drm/drm.ko*' '*/kernel/drivers/gpu/drm/drm_*helper.ko*' '*/kernel/drivers/gpu/drm/vgem/*' \
        2>>"$work/log"
    # Newer packages have it all below usr/.
    [[ -d $work/root/lib ]] || mv "$work/root/usr/lib" "$work/root/lib"
    depmod -b "$work/root" "$(ls "$work/root/lib/modules")" 2>>"$work/log" && mv "$work/root" "$cache/$package"
    local rc=$?
    ((rc == 0)) || tail -n 5 "$work/log" >&2
    rm -rf "$work"
    return $rc
}

own_kernel='Set TINYNCCL_VM_KERNEL to a folder with boot/vmlinuz* and lib/modules/*'
find_kernel() {
    kernel=${TINYNCCL_VM_KERNEL:-}
    if [[ ! $kernel ]]; then
        # One that is there is used for good, also without a network.
        local there=("$cache"/linux-image-*)
        if ((${#there[@]})); then
            kernel=${there[-1]}
        else
            if ! have apt-get || ! have dpkg-deb; then
                cannot "no apt-get and dpkg: this is no Debian. $own_kernel"
            fi
            local package
            package=$(kernel_package)
            if [[ ! $package && $(id -u) = 0 ]]; then
                say "no package lists: apt-get update"
                apt-get -q update >&2
                package=$(kernel_package)
            fi
            [[ $package ]] || cannot "apt knows no linux-image-amd64: run 'apt-get update' as root; if this is no Debian: $own_kernel"
            fetch_kernel "$package" || cannot "Debian's package $package could not be downloaded and unpacked"
            kernel=$cache/$package
        fi
    fi
    local images=("$kernel"/boot/vmlinuz*) versions=("$kernel"/lib/modules/*)
    ((${#images[@]} && ${#versions[@]})) || cannot "no boot/vmlinuz* or lib/modules/* below $kernel"
    image=${images[-1]}
    version=${image##*/vmlinuz-}
    [[ -d $kernel/lib/modules/$version ]] || cannot "no modules of $version below $kernel"
}

# Unpacks the kernel's own compressed payload: that costs the emulated processor seconds at every boot. The place and
# length stand in the header (Documentation/x86/boot.rst). QEMU starts an uncompressed kernel by its PVH entry.
unpack_image() {
    local sectors offset length
    sectors=$(od -An -tu1 -j 0x1f1 -N 1 "$1")
    offset=$(od -An -tu4 -j 0x248 -N 4 "$1")
    length=$(od -An -tu4 -j 0x24c -N 4 "$1")
    tail -c +$(((sectors + 1) * 512 + offset + 1)) "$1" | head -c "$length" >"$2.packed"
    case $(od -An -tx1 -N 4 "$2.packed") in
        ' fd 37 7a 58') xz -dc --single-stream <"$2.packed" >"$2" 2>/dev/null ;;
        ' 28 b5 2f fd') zstd -dc <"$2.packed" >"$2" 2>/dev/null ;;
        ' 1f 8b 08'*) gzip -dc <"$2.packed" >"$2" 2>/dev/null ;;
    esac
    rm -f "$2.packed"
    [[ $(head -c 4 "$2" 2>/dev/null) = $'\x7fELF' ]]
}

# The initramfs: busybox, the modules and their order, init.
build_initramfs() {
    local root module path name
    root=$(mktemp -d "$cache/initramfs.XXXXXX") || return 1
    mkdir -p "$root"/{bin,proc,sys,dev,host,modules}
    cp "$busybox" "$root/bin/busybox"
    for name in sh mount mkdir chmod insmod ln hostname chroot dmesg sync reboot sleep; do
        ln -s busybox "$root/bin/$name"
    done
    cp "$here/rxe-vm/init.sh" "$root/init"
    chmod 755 "$root/init"
    for module in "${modules[@]}"; do
        modprobe -d "$kernel" -S "$version" --show-depends "$module" 2>/dev/null >"$root/depends" ||
            [[ $optional == *" $module "* ]] || { say "no module $module in $kernel"; rm -rf "$root"; return 1; }
        while read -r _ path _; do
            name=${path##*/}
            name=${name%.xz}
            [[ ! -e $root/modules/$name ]] || continue
            case $path in
                *.xz) xz -dc "$path" >"$root/modules/$name" ;;
                *) cp "$path" "$root/modules/$name" ;;
            esac
            echo "$name" >>"$root/modules/order"
        done < <(grep ^insmod "$root/depends")
    done
    rm -f "$root/depends"
    (cd "$root" && find . | cpio -o -H newc --quiet) >"$1.new" && mv "$1.new" "$1"
    local rc=$?
    rm -rf "$root"
    return $rc
}

prepare() {
    exec {lock}>"$cache/lock"
    flock "$lock"
    # What failed runs left for a look, after a day.
    find "$cache" -maxdepth 1 -name 'run.*' -mtime +0 -exec rm -rf {} +
    find_kernel
    vmlinux=$cache/vmlinux-$version
    [[ -s $vmlinux && $vmlinux -nt $image ]] || unpack_image "$image" "$vmlinux" || {
        say "note: $image could not be unpacked beforehand, booting takes longer"
        cp "$image" "$vmlinux"
    }
    local key
    key=$(cat "$here/rxe-vm/init.sh" "$busybox" "$kernel/lib/modules/$version/modules.dep" <(echo "$kernel ${modules[*]}") | cksum)
    initramfs=$cache/initramfs-$version-${key%% *}.cpio
    [[ -s $initramfs ]] || build_initramfs "$initramfs" || cannot "the initramfs could not be built"
    exec {lock}>&-
}

# ---- the machine

# The end of the machine is the end of QEMU (panic, reboot, with -no-reboot); the rest makes booting faster.
boot_options='panic=-1 reboot=triple quiet mitigations=off nokaslr tsc=reliable no_timer_check random.trust_cpu=on'
boot_options+=' cryptomgr.notests'

# machine ACCEL: sets `qemu` to the command line, with the run folder and $OUT as they are now.
machine() {
    local cpu=host accelerator=kvm
    if [[ $1 = tcg ]]; then
        # Without erms, Linux copies by words instead of "rep movsb", which the emulator does byte by byte: that doubles
        # the bandwidth of RDMA. Without monitor an idle processor sleeps.
        cpu=${TINYNCCL_VM_CPU:-max,-erms,-monitor} accelerator=tcg,thread=multi
    fi
    qemu=(qemu-system-x86_64 -M q35 -accel "$accelerator" -cpu "$cpu" -smp "$smp" -m "$mem"
        -nodefaults -no-user-config -display none -no-reboot
        -kernel "$vmlinux" -initrd "$initramfs"
        -append "console=ttyS0 $boot_options ${TINYNCCL_VM_APPEND:-}"
        -serial "file:$run/console"
        -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap
        -virtfs "local,path=$run,mount_tag=run,security_model=none"
        -virtfs "local,path=$out,mount_tag=out,security_model=none")
    [[ $interactive != yes ]] || qemu+=(-chardev stdio,id=terminal,signal=off -serial chardev:terminal)
}

# KVM may be there and not work (nested in another machine, for example): what counts is that it boots this one.
# Tried once for each boot of the host.
choose_accel() {
    [[ $accel = auto ]] || return 0
    accel=tcg
    [[ -r /dev/kvm && -w /dev/kvm ]] || return 0
    local known
    known=$cache/kvm-$(</proc/sys/kernel/random/boot_id)
    if [[ ! -s $known ]]; then
        say "trying KVM, once (at most 20 s)"
        rm -f "$cache"/kvm-*
        if try_kvm 2>/dev/null; then echo yes; else echo no; fi >"$known"
    fi
    if [[ $(<"$known") = yes ]]; then accel=kvm; fi
}

# shellcheck disable=SC2030,SC2031 # in a shell of its own, so that the variables stay as they are
try_kvm() (
    run=$(mktemp -d "$cache/run.XXXXXX") || exit 1
    trap 'rm -rf "$run"' EXIT
    out=$run smp=1 interactive=no topology=none
    write_job true
    machine kvm
    ulimit -c 0
    timeout -k 1 20 "${qemu[@]}" </dev/null >/dev/null 2>&1
    [[ -s $run/status ]]
)

# What the guest is to do; see guest.sh.
write_job() {
    # shellcheck disable=SC2034 # all of these are read by guest.sh
    local command=("$@") directory=$PWD terminal=$interactive environment=() name
    local terminal_settings='' terminal_rows='' terminal_columns=''
    environment=(HOME=/root USER=root "PATH=$PATH" LANG=C.UTF-8 TMPDIR=/run/tmp "OUT=$out" "RXE_VM=$topology")
    for name in RUST_LOG RUST_BACKTRACE "${!TINYNCCL_@}" "${carried[@]}"; do
        if [[ $name == TINYNCCL_VM_* ]]; then
            continue # ours
        elif [[ $name == *=* ]]; then
            environment+=("$name")
        elif [[ -v $name ]]; then
            environment+=("$name=${!name}")
        fi
    done
    if [[ $terminal = yes ]]; then
        environment+=("TERM=${TERM:-dumb}")
        read -r terminal_rows terminal_columns < <(stty size)
        terminal_settings=$(stty -g)
    fi
    declare -p command directory environment terminal topology loss delay mtu memlock \
        terminal_settings terminal_rows terminal_columns >"$run/job.sh"
    printf '%s\n' "$out" >"$run/out-path"
    cp "$here/rxe-vm/guest.sh" "$run/guest.sh"
}

finish() {
    trap '' INT TERM HUP
    [[ ! ${machine_pid:-} ]] || kill "$machine_pid" 2>/dev/null
    [[ ! ${followers[*]:-} ]] || kill "${followers[@]}" 2>/dev/null
    [[ ! ${saved_terminal:-} ]] || stty "$saved_terminal"
    if [[ ${own_out:-} ]] && ! rmdir "$out" 2>/dev/null; then say "files of \$OUT are in $out"; fi
    [[ ! ${run:-} || ${keep_run:-} ]] || rm -rf "$run"
}

explain_death() {
    keep_run=yes
    say "$1; from the guest's console ($run/console):"
    {
        grep -a -m 1 -E 'Kernel panic|BUG:|Oops' "$run/console"
        tail -n "${2:-15}" "$run/console"
    } | tr -d '\r' | sed 's/^/rxe-vm:   /' >&2
}

run_command() {
    run=$(mktemp -d "$cache/run.XXXXXX") || cannot "cannot write to $cache; set TINYNCCL_VM_CACHE"
    trap finish EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    if [[ $out ]]; then
        mkdir -p "$out" || die 2 "cannot make the folder '$out'"
        out=$(cd "$out" && pwd)
    else
        out=$(mktemp -d "$cache/out.XXXXXX") || cannot "cannot write to $cache; set TINYNCCL_VM_CACHE"
        own_out=yes
    fi
    touch "$run"/{stdout,stderr,console}
    write_job "$@"
    machine "$accel"
    if [[ $action = print ]]; then
        printf '%q ' "${qemu[@]}"
        echo
        return
    fi

    local rc
    if [[ $interactive = yes ]]; then
        saved_terminal=$(stty -g)
        say "starting; $timeout s in all (--timeout)"
        timeout --foreground -k 5 "$timeout" "${qemu[@]}"
        rc=$?
    else
        followers=()
        timeout -k 5 "$timeout" "${qemu[@]}" </dev/null >"$run/qemu" 2>&1 &
        machine_pid=$!
        tail -q -c +1 -s 0.1 --pid="$machine_pid" -f "$run/stdout" &
        followers+=($!)
        tail -q -c +1 -s 0.1 --pid="$machine_pid" -f "$run/stderr" >&2 &
        followers+=($!)
        wait "$machine_pid"
        rc=$?
        machine_pid=
        wait "${followers[@]}"
        followers=()
    fi
    if [[ -s $run/dmesg ]] && grep -q -E 'BUG:|WARNING:|Oops|general protection' "$run/dmesg"; then
        keep_run=yes
        say "note: the guest's kernel complained; see $run/dmesg"
    fi
    if [[ -s $run/status ]]; then
        exit "$(<"$run/status")"
    elif ((rc == 124 || rc == 137)); then
        explain_death "timed out after $timeout s (--timeout)" 5
        exit 124
    elif [[ -s $run/problem ]]; then
        die 125 "the devices could not be made: $(<"$run/problem")"
    elif ((rc != 0)) && [[ ! -s $run/console ]]; then
        say "QEMU failed with exit code $rc:"
        cat "$run/qemu" >&2
        exit 125
    fi
    explain_death "the guest died"
    exit 125
}

if [[ $interactive = auto ]]; then
    interactive=no
    if [[ $# = 1 && $1 =~ ^(/bin/|/usr/bin/)?(ba)?sh$ && -t 0 && -t 1 ]]; then interactive=yes; fi
elif [[ ! -t 0 ]]; then
    usage "--interactive needs a terminal"
fi
[[ $timeout ]] || timeout=$([[ $interactive = yes ]] && echo 3600 || echo 300)
prepare
choose_accel
case $action in
    setup) say "ready: $version, accel=$accel, in $cache" ;;
    *) run_command "$@" ;;
esac

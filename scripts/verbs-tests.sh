#!/usr/bin/env bash
# Runs everything of RDMA verbs in a virtual machine with soft-RoCE: builds on the host, then one machine per topology
# (scripts/rxe-vm.sh) runs all of its rows one after the other.
#
#   scripts/verbs-tests.sh [NAME...]       default: all rows; NAME is the second column
#   scripts/verbs-tests.sh --quick         without the rows that measure, and the longer trainings: what .ci/run runs
#   scripts/verbs-tests.sh --list
#
# Needs `scripts/setup.sh --verbs`. Exit code: 0 all passed, 1 something failed, 77 no machine can be run here.
# Logs stay in target/verbs-tests/TOPOLOGY/NAME.log. The row's command runs in its package's folder.
set -u -o pipefail
shopt -s nullglob

# A test binary of cargo, built with the feature `verbs`:
#   tests TOPOLOGY NAME PACKAGE TARGET [ARGUMENTS OF THE TEST BINARY...]    TARGET: lib, or the name of one of its tests
# A program built with the feature `verbs`, or any command; {NAME} in it becomes the path of the built program NAME, and {python-package}
# the folder of the Python package, built with `verbs` too:
#   program TOPOLOGY NAME PACKAGE COMMAND...
#   tool TOPOLOGY NAME COMMAND...
# TOPOLOGY: pair, rails, line or triangle, as in scripts/rxe-vm.sh. A row of a package or target that is not there is SKIPPED.
# Each row has at most $row_limit seconds. TINYNCCL_TEST_VERBS=1 tells tests that a device must be there.
row_limit=200
rows() {
    # The machine itself, with the field's own tools.
    tool pair pingpong bash scripts/rxe-vm/pingpong.sh rxe_ab rxe_ba -e
    # The library: registered memory, ranks as processes, the contract of every transport.
    tests pair verbs-units tinynccl-transport lib verbs::
    tests pair processes tinynccl cpu processes::over_rdma
    tests pair persistent tinynccl cpu --test-threads=1 persistent::
    # With one queue pair per link, and with several: two devices per node carry them.
    tests rails conformance tinynccl conformance --test-threads=2 verbs handshake processes
    tests triangle mesh tinynccl cpu processes::over_rdma
    # The network plugin's queue pairs beside TCP.
    tests pair net tinynccl-transport lib --test-threads=1 rails::rdma::tests::long rails::rdma::tests::many rails::rdma::tests::streams
    # Where two ranks have no common subnet, through a third.
    tests line relayed-links tinynccl conformance --test-threads=2 relayed_verbs
    tests line relays tinynccl cpu --test-threads=1 line::
    tests line relayed-mesh tinynccl cpu processes::over_rdma
    # Networks of their own, which fail: last of the library, and one at a time.
    tests pair faults tinynccl cpu --test-threads=1 --nocapture rdma_faults::
    # The milestones.
    tests pair verbs-hello verbs-hello process --test-threads=1
    tests pair rdma-write rdma-write process --test-threads=1
    tests pair cuda-verbs cuda-verbs process --test-threads=1 over_rdma dmabuf
    tests pair no-memory cuda-verbs process --nocapture no_memory
    tests pair allreduce-verbs allreduce-verbs process --test-threads=1
    # The whole chain: training over RDMA, also PyTorch's, gives the weights that it gives over TCP, and packets have flowed.
    local same=(bash "$PWD/scripts/rxe-vm/same.sh")
    program pair mlp ddp-train "${same[@]}" 100 {ddp-train} --epochs 10
    program pair sine ddp-sine "${same[@]}" 100 {ddp-sine} --plot sine.svg
    program pair gpt ddp-gpt "${same[@]}" 200 {ddp-gpt} --preset tiny --data "$PWD/README.md" --steps 10 --threads 1 --sample-chars 10 --out gpt
    if needs torch "/usr/bin/python3 has no torch: scripts/setup.sh --python" /usr/bin/python3 -c 'import torch.distributed'; then
        program pair torch tinynccl-python env PYTHONPATH={python-package} /usr/bin/python3 "$PWD/scripts/rxe-vm/torch_chain.py"
    fi
    # What registering for each call costs beside the slots: the figure's command, with few messages.
    program pair registration perf bash "$PWD/scripts/rxe-vm/registration.sh" {perf} 10 4096 1048576
    # A rail that is slower than the other gets less of each long message.
    program rails weights perf bash "$PWD/scripts/rxe-vm/weights.sh" {perf}
    # Ranks that somebody else started.
    local mpirun=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
        PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe mpirun)
    if needs mpirun "mpirun is not here: scripts/setup.sh --mpi" command -v mpirun; then
        program pair mpirun allreduce-verbs "${mpirun[@]}" -n 2 {allreduce-verbs} --bytes 1K,64K --iters 2
        program pair mpirun-stress stress "${mpirun[@]}" -n 3 {stress} --transport verbs --collective all,pingpong,neighbours \
            -b 8 -e 64K -f 64 -n 1 -w 0 --repetitions 1
    fi
    # The lab that needs a device which pins pages; its output is that of the book.
    tests pair labs labs process --test-threads=1 rdma_stale
}

# ---- inside the machine: runs the plan, whose lines are NAME, folder, kind and a quoted command, tab-separated

inside() {
    local plan=$1 name folder kind words rc start status=0 ran result
    while IFS=$'\t' read -r name folder kind words; do
        start=$(date +%s.%N)
        # shellcheck disable=SC2154 # ours: exported by the host's half
        (cd "$folder" && eval "exec timeout -k 5 $row_limit $words") </dev/null >"$OUT/$name.log" 2>&1
        rc=$?
        result=ok
        ran=
        if [[ $kind = tests ]]; then
            ran=", $(awk '/^test result:/ { n += $4; i += $8 } END { printf "%d passed, %d ignored", n, i }' "$OUT/$name.log")"
            # A filter that fits nothing is a mistake.
            [[ $ran != ', 0 passed'* || $rc != 0 ]] || { rc=1 && echo "no test ran: $words" >>"$OUT/$name.log"; }
        fi
        ((rc == 0)) || result="FAILED (exit code $rc$( ((rc == 124)) && echo ", timed out after $row_limit s"))"
        printf 'verbs-tests: %s %s: %s%s, %.1f s\n' "$RXE_VM" "$name" "$result" "$ran" \
            "$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { print b - a }')"
        grep -a 'SKIPPED' "$OUT/$name.log" | sed 's/^/    /'
        if ((rc != 0)); then
            tail -n 40 "$OUT/$name.log" | sed 's/^/    /'
            status=1
        fi
    done <"$plan"
    return $status
}

if [[ ${1:-} = --inside ]]; then
    inside "$2"
    exit
fi

# ---- on the host

cd "$(dirname "$0")/.." || exit 1
chosen=("$@")
[[ ${1:-} != -* || $1 = --list || $1 = --quick ]] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" && exit 2; }
base=target/verbs-tests
skipped=() planned=0

wanted() {
    local name
    if [[ ${chosen[0]-} = --quick ]]; then
        [[ " sine gpt registration weights " != *" $1 "* ]]
        return
    fi
    ((${#chosen[@]})) || return 0
    for name in "${chosen[@]}"; do [[ $name != "$1" ]] || return 0; done
    return 1
}

plan() {
    local topology=$1 name=$2 folder=$3 kind=$4
    shift 4
    mkdir -p "$base/$topology"
    printf '%s\t%s\t%s\t%s\n' "$name" "$folder" "$kind" "$(printf '%q ' "$@")" >>"$base/$topology/plan"
    planned=$((planned + 1))
}

# Sets `folder` to that of a package with the feature verbs.
package_folder() {
    folder=$(jq -r --arg p "$1" '.packages[] | select(.name == $p and .features.verbs) | .manifest_path' <<<"$metadata")
    folder=${folder%/Cargo.toml}
    [[ $folder ]] || { skipped+=("$2: no package $1 with the feature verbs") && return 1; }
}

# Builds and prints the path of what is built: build PACKAGE'S-FOLDER TARGET-NAME CARGO-ARGUMENTS... Always of the same packages with the
# same features, so that what they share is built once.
build() {
    local folder=$1 target=$2
    shift 2
    cargo "$@" --locked "${packages[@]}" --message-format=json-render-diagnostics |
        jq -r --arg m "$folder/Cargo.toml" --arg t "$target" \
            'select(.reason == "compiler-artifact" and .manifest_path == $m and .target.name == $t) |
             .executable // (select(.target.kind[0] == "cdylib") | .filenames[0])' |
        tail -n 1
}

# needs NAME WHAT-IS-MISSING COMMAND...: whether COMMAND succeeds; if not, says that rows are left out.
needs() {
    local name=$1 why=$2
    shift 2
    "$@" >/dev/null 2>&1 || { skipped+=("$name: $why") && return 1; }
}

# Prints the folder to put into PYTHONPATH: the Python package, built with `verbs`.
python_package() {
    local library package=$PWD/$base/python/tinynccl
    library=$(build "$folder" tinynccl_python build --lib)
    [[ -f $library ]] || return 1
    mkdir -p "$package" && cp -r bindings/python/python/tinynccl/. "$package" && cp "$library" "$package/_core.abi3.so" && dirname "$package"
}

tests() {
    local topology=$1 name=$2 package=$3 target=$4 folder executable which
    shift 4
    wanted "$name" && package_folder "$package" "$name" || return 0
    which=$target
    # The library's own tests go by the library's name.
    if [[ $target = lib ]]; then
        which=${package//-/_}
        set -- --lib -- "$@"
    else
        [[ -e $folder/tests/$target.rs || -e $folder/tests/$target/main.rs ]] || {
            skipped+=("$name: no test $target in $package")
            return 0
        }
        set -- --test "$target" -- "$@"
    fi
    local selection=()
    while [[ $1 != -- ]]; do selection+=("$1") && shift; done
    shift
    executable=$(build "$folder" "$which" test --no-run "${selection[@]}")
    [[ -x $executable ]] || {
        failed+=("$name: does not build")
        return 0
    }
    plan "$topology" "$name" "$folder" tests "$executable" "$@"
}

program() {
    local topology=$1 name=$2 package=$3 folder word words=() binary executable
    shift 3
    wanted "$name" && package_folder "$package" "$name" || return 0
    for word in "$@"; do
        if [[ $word =~ ^(PYTHONPATH=)?\{(.*)\}$ ]]; then
            binary=${BASH_REMATCH[2]}
            case $binary in
                python-package) executable=$(python_package) ;;
                *) executable=$(build "$folder" "$binary" build --bin "$binary") ;;
            esac
            [[ -x $executable ]] || {
                failed+=("$name: does not build")
                return 0
            }
            word=${word%%\{*}$executable
        fi
        words+=("$word")
    done
    plan "$topology" "$name" "$folder" program "${words[@]}"
}

tool() {
    local topology=$1 name=$2
    shift 2
    wanted "$name" || return 0
    plan "$topology" "$name" "$PWD" tool "$@"
}

if [[ ${1:-} = --list ]]; then
    needs() { true; }
    tests() { echo "$2: tests of $3 ($4), $1"; }
    program() { echo "$2: program of $3, $1"; }
    tool() { echo "$2: command, $1"; }
    rows
    exit
fi

scripts/rxe-vm.sh --setup-only || exit $?
command -v jq >/dev/null || { echo "verbs-tests: cannot run here: jq is not installed; run scripts/setup.sh --verbs as root" >&2 && exit 77; }
rm -rf "$base"
mkdir -p "$base"
metadata=$(cargo metadata --no-deps --format-version 1 --locked) || exit 1
failed=()
packages=()
for package in $(jq -r '.packages[] | select(.features.verbs) | .name' <<<"$metadata"); do
    packages+=(-p "$package" --features "$package/verbs")
done
rows

for list in "$base"/*/plan; do
    topology=$(basename "$(dirname "$list")")
    scripts/rxe-vm.sh "--$topology" --out "$base/$topology" --timeout 600 --mem 2G --env "row_limit=$row_limit" --env TINYNCCL_TEST_VERBS=1 \
        bash scripts/verbs-tests.sh --inside "$list"
    rc=$?
    ((rc != 77)) || exit 77
    ((rc == 0)) || failed+=("$topology (exit code $rc)")
done

for row in ${skipped[@]+"${skipped[@]}"}; do echo "verbs-tests: SKIPPED: $row"; done
((planned)) || failed+=("nothing to run")
if ((${#failed[@]})); then
    printf 'verbs-tests: FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "verbs-tests: all ok, $planned rows"

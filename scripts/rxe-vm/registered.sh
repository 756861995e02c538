#!/bin/bash
# In the guest (scripts/rxe-vm.sh --pair): calls on registered and on ordinary buffers in turn, between two linked devices.
#
#   registered.sh STRESS ROUNDS
#
# STRESS is the program of milestone 10, built with --release --features verbs. $OUT gets one CSV file per round and kind of
# buffer. Last, what a copy of 4 MiB takes in this machine.
set -u
stress=$1 rounds=$2
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 TINYNCCL_TUNE=off TINYNCCL_TRANSPORT=verbs
port=29500

run() {
    local buffers=$1 to=$2
    shift 2
    port=$((port + 1))
    local arguments=(--csv -c 0 -w 2 --repetitions 5 --budget 0.1 --no-pin -d f32 --buffers "$buffers" "$@")
    MASTER_PORT=$port RANK=1 LOCAL_RANK=1 TINYNCCL_VERBS_DEVICE=rxe_ba "$stress" "${arguments[@]}" >/dev/null 2>"$to.err" &
    MASTER_PORT=$port RANK=0 LOCAL_RANK=0 TINYNCCL_VERBS_DEVICE=rxe_ab "$stress" "${arguments[@]}" >"$to.csv" || {
        cat "$to.err"
        exit 1
    }
    wait $! || exit 1
}

for round in $(seq "$rounds"); do
    for buffers in reused registered; do
        run $buffers "$OUT/all_reduce-$buffers-$round" --collective all_reduce -b 1M -e 4M -f 4
        run $buffers "$OUT/sendrecv-$buffers-$round" --collective sendrecv,pingpong -b 64K -e 1M -f 16
    done
done
python3 - <<'PYTHON'
import time
a, b = bytearray(4 << 20), bytearray(b"x" * (4 << 20))
times = []
for _ in range(15):
    start = time.perf_counter()
    memoryview(a)[:] = b
    times.append(time.perf_counter() - start)
print(f"copy of 4 MiB: {sorted(times)[7] * 1e6:.0f} us")
PYTHON

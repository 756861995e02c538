#!/usr/bin/env bash
# ddp-gpt and PyTorch train the same network on the same GPUs, one after the other; a table at the end.
#
#   milestones/16-ddp-gpt/compare/run.sh TEXT [GPUS] [STEPS] [SEED...]
#
# Needs on the machine: ddp-gpt, built with --features cuda (DDP_GPT names the program, else target/release/ddp-gpt), its
# libraries where the loader finds them, and a python3 with PyTorch, whose torchrun is on the PATH; Triton and a C compiler for the compiled runs. PYTORCH picks
# the runs, by default "eager compiled graph": graph is compiled, and the whole step in one CUDA graph. BACKENDS picks what carries
# DDP's gradients, by default "nccl"; tinynccl needs the package of bindings/python. Logs and histories of losses are left in
# $OUT, or out/compare.
set -eu -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
(($#)) || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
text=$1 gpus=${2:-2} steps=${3:-3000}
shift $(($# < 3 ? $# : 3))
(($#)) || set -- 1337
program=${DDP_GPT:-$here/../../../target/release/ddp-gpt}
out=${OUT:-out/compare}
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
fixed=(--data "$text" --preset full --batch 128 --steps "$steps" --eval-every 250)
for seed; do
    "$program" "${fixed[@]}" --seed "$seed" --device cuda --ranks "$gpus" --graph --log-every 250 --sample-chars 0 \
        --out "$out/run" | tee "$out/ddp-gpt.$seed.log"
    rm -r "$out/run"
    for way in $(for way in ${PYTORCH:-eager compiled graph}; do printf "$way-%s " ${BACKENDS:-nccl}; done); do
        backend=${way#*-} way=${way%-*}
        options=(--backend "$backend")
        [[ $way == eager ]] || options+=(--compile default)
        [[ $way == graph ]] && options+=(--graph)
        # A way that does not work on a machine is said and left out.
        run=$out/pytorch-$way-$backend.$seed
        timeout 600 torchrun --nproc_per_node "$gpus" "$here/torch_gpt.py" "${fixed[@]}" --seed "$seed" "${options[@]}" \
            --history "$run.json" 2>"$run.err" | tee "$run.log" ||
            { echo "PyTorch, $way, $backend: failed:"; grep -E 'Error|error' "$run.err" | tail -3; }
    done
done
python3 "$here/table.py" "$out"/*.log

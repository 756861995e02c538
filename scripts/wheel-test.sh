#!/usr/bin/env bash
# Builds the wheel of scripts/wheel.sh, installs it into fresh virtual environments, and uses it there.
#
#   scripts/wheel-test.sh [WHEEL]    a wheel that is there, in place of a new one
#
# PYTHONS names the interpreters (default: those of 3.11 to 3.14 on the PATH). DDP runs where the interpreter has torch, or
# over the packages that TORCH names for pip, for example "torch==2.11.0 numpy". Exit status: 0 passed, 1 failed, 77 no tools
# or no interpreter.
set -eu -o pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ ${1-} ]]; then
    wheel=$(realpath "$1")
else
    scripts/wheel.sh "$work/dist"
    wheel=$(echo "$work"/dist/tinynccl-*.whl)
fi
if [[ ! ${PYTHONS-} ]]; then
    # One that is named but does not start (pyenv has such) is none.
    for version in 11 12 13 14; do
        python3.$version --version >/dev/null 2>&1 && PYTHONS+=" $(command -v python3.$version)"
    done
fi
[[ $(echo $PYTHONS) ]] || { echo "wheel-test: no Python of 3.11 or later" >&2; exit 77; }

cat >"$work/ranks.py" <<'EOF'
import multiprocessing, os, sys, tinynccl

def rank(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with tinynccl.Comm.from_env() as comm:
        data = memoryview(bytearray(4000)).cast("f")
        for i in range(len(data)): data[i] = rank + 1
        comm.all_reduce(data)
        assert data[0] == data[-1] == 3.0, (data[0], data[-1])

if __name__ == "__main__":
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    ranks = [multiprocessing.Process(target=rank, args=(r, port)) for r in range(2)]
    for r in ranks: r.start()
    for r in ranks: r.join()
    assert [r.exitcode for r in ranks] == [0, 0], [r.exitcode for r in ranks]
    print("two ranks: 1 + 2 = 3")
EOF
cat >"$work/ddp.py" <<'EOF'
import torch, torch.distributed as dist, tinynccl.torch
dist.init_process_group("tinynccl")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4)).sum().backward()
grads = [torch.empty(2, 4) for _ in range(2)]
dist.all_gather(grads, model.module.weight.grad)
assert torch.equal(grads[0], grads[1])
if dist.get_rank() == 0: print("torch", torch.__version__, "DDP over", dist.get_backend())
dist.destroy_process_group()
EOF

for python in $PYTHONS; do
    echo "== $("$python" --version)"
    rm -rf "$work/venv"
    "$python" -m venv --without-pip "$work/venv"
    # One pip for all: the interpreter's own may be missing (Debian's) or old.
    pip=(python3 -m pip --python "$work/venv/bin/python" install -q)
    "${pip[@]}" --no-index --no-deps "$wheel"
    bin=$work/venv/bin
    cd "$work"
    "$bin/python" -c 'import tinynccl, tinynccl.errors; print("tinynccl", tinynccl.__version__, tinynccl.__file__)'
    "$bin/python" -m tinynccl --version
    "$bin/tinynccl" schedule all_reduce ring --ranks 2 >/dev/null
    "$bin/python" -m tinynccl doctor >doctor.txt
    grep -q "$(basename "$(dirname "$("$bin/tinynccl" libraries)")")/_native/libnccl.so.2" doctor.txt
    # A program that asks the loader for libnccl.so.2 gets ours.
    "$bin/tinynccl" run -- "$bin/python" -c 'import ctypes; l = ctypes.CDLL("libnccl.so.2"); v = ctypes.c_int(); assert l.ncclGetVersion(ctypes.byref(v)) == 0; print("libnccl.so.2", v.value)'
    "$bin/python" ranks.py
    for library in libnccl-net-tinynccl.so libibverbs.so.1; do
        "$bin/python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$("$bin/tinynccl" libraries)/$library"
    done
    if [[ ${TORCH-} ]]; then
        "${pip[@]}" $TORCH
        "$bin/python" -m torch.distributed.run --nproc_per_node 2 ddp.py
    elif "$python" -c 'import torch' 2>/dev/null; then
        # Without -r, torch 1.13 starts nothing under Python 3.11.
        PYTHONPATH=$("$python" -c 'import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))') \
            "$bin/python" -m torch.distributed.run -r 9:3 -t 9:3 --nproc_per_node 2 ddp.py
    else
        echo "without torch"
    fi
    cd - >/dev/null
done

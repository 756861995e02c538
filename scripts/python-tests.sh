#!/usr/bin/env bash
# Builds the Python package and runs its tests: numpy arrays, torch tensors, the backend of torch.distributed.
#
#   scripts/python-tests.sh            everything; three minutes when built, on two idle cores
#   scripts/python-tests.sh --table    the table of docs/pytorch.md: how each check ends over tinynccl and over gloo
#   scripts/python-tests.sh --judge [OPTIONS]    programs and random sequences over tinynccl and over gloo (scripts/judge/gloo.sh)
#   scripts/python-tests.sh --bench latency|ddp [OPTIONS]    the measurements of bindings/python/bench; --help lists the options
#
# PYTHON names the interpreter (default: /usr/bin/python3, to which Debian's torch belongs, else python3). As root on Debian it
# installs python3-torch and python3-numpy if they are missing. With maturin (on the PATH or in target/maturin)
# the tests run from a wheel that pip has installed in a virtual environment, without it from a folder with the same files. Exit status: 0 passed, 1 failed, 77 the interpreter or its packages cannot be had here.
set -eu -o pipefail
cd "$(dirname "$0")/.."

python=${PYTHON-}
if [[ -z $python ]]; then
    python=/usr/bin/python3
    [[ -x $python ]] || python=$(command -v python3 || true)
fi
has() { "$python" -c "import $1" >/dev/null 2>&1; }
if [[ -z $python ]] || ! has numpy || ! has torch; then
    if [[ -n ${PYTHON-} ]]; then
        echo "python-tests: $PYTHON has no numpy or no torch" >&2
        exit 77
    fi
    scripts/setup.sh --python || exit 77
    python=/usr/bin/python3
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "python-tests: $("$python" --version) is too old: the extension is for 3.11 or later" >&2
    exit 77
}

site=${CARGO_TARGET_DIR:-target}/python-tests
rm -rf "$site" && mkdir -p "$site"
site=$(cd "$site" && pwd)
# As the tests of Rust are built, which shares the library with them; only measurements take a release.
profile=(--profile dev) features=()
[[ ${1-} == --bench ]] && profile=(--release) features=(--features bench)
maturin=$(command -v maturin || true)
[[ -z $maturin && -x target/maturin/bin/maturin ]] && maturin=target/maturin/bin/maturin
if [[ -n $maturin ]]; then
    # Debian's names for platforms differ from the wheels': whoever installs it elsewhere builds it elsewhere.
    "$maturin" build "${profile[@]}" --locked --compatibility linux -m bindings/python/Cargo.toml -o "$site" ${features[@]+"${features[@]}"}
    wheel=$(echo "$site"/tinynccl-*.whl)
    # Debian's Python may have no pip; that of maturin's environment installs for it.
    "$python" -m venv --without-pip --system-site-packages "$site/venv"
    pip=("$python" -m pip)
    [[ -x target/maturin/bin/pip ]] && pip=(target/maturin/bin/pip)
    "${pip[@]}" --python "$site/venv/bin/python" install -q --no-index --no-deps "$wheel"
    python=$site/venv/bin/python
    site=$(dirname "$(cd / && "$python" -c 'import tinynccl; print(tinynccl.__path__[0])')")
    [[ $site == */python-tests/venv/* ]] || { echo "python-tests: tinynccl came from $site and not from the wheel" >&2; exit 1; }
else
    echo "python-tests: no maturin, so the tests run from a folder and not from a wheel ('scripts/setup.sh --python' installs it)" >&2
    library=$(cargo build "${profile[@]}" --locked -p tinynccl-python ${features[@]+"${features[@]}"} --message-format=json-render-diagnostics |
        sed -n 's/.*"\([^"]*libtinynccl_python\.so\)".*/\1/p' | tail -n 1)
    cp -r bindings/python/python/tinynccl "$site"
    cp "$library" "$site/tinynccl/_core.abi3.so"
fi
for file in __init__.py _core.abi3.so _core.pyi errors.py py.typed torch/__init__.py; do
    [[ -f $site/tinynccl/$file ]] || { echo "python-tests: the package has no $file" >&2; exit 1; }
done

export PYTHONPATH=$site OMP_NUM_THREADS=1
# Ends a program in which memory of Python's is taken without the interpreter's lock, as torch 1.13's Store.get does.
[[ ${1-} == --bench ]] || export PYTHONMALLOC=debug
if [[ ${1-} == --bench ]]; then
    exec "$python" "bindings/python/bench/${2:?latency or ddp}.py" "${@:3}"
fi
cd bindings/python/tests
if [[ ${1-} == --table ]]; then
    exec "$python" table.py
fi
if [[ ${1-} == --judge ]]; then
    failed=0
    "$python" test_programs.py --judge || failed=1
    "$python" sequences.py "${@:2}" || failed=1
    exit $failed
fi
"$python" -c 'import sys, numpy, torch; print("Python", sys.version.split()[0], "numpy", numpy.__version__, "torch", torch.__version__)'
failed=0
for test in test_comm.py test_fork.py test_torch.py test_failures.py test_survive.py test_reconfigure.py test_programs.py "sequences.py --seconds 20"; do
    echo "== $test"
    # Words are arguments.
    # shellcheck disable=SC2086
    "$python" $test || failed=1
done
exit $failed

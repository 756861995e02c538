#!/usr/bin/env bash
# Every client over several libraries in turn, on a machine with two GPUs, PyTorch, JAX and CuPy:
#
#   scripts/nccl/clients.sh [-a AUDIT] [-c CLIENTS] [-l SECONDS] OUT NAME=LIBRARY...
#   scripts/nccl/clients.sh -a $PWD/libnccl_audit.so out/clients nvidia= tinynccl=$PWD/libnccl.so
#
# LIBRARY is preloaded; an empty one is each client's own. -a: our audit library, for JAX, which opens its own by a path.
# -c: torch, torch_lazy, torch_one, cupy, vllm, jax, soak; comma-separated, default all. -l: limit of each (default 600).
# OUT gets a log per client and library, checks.csv, and a table at the end. Exit status 1 if a check that is ok over the
# first library is not ok over another.
set -eu -o pipefail
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
audit='' clients=torch,torch_lazy,torch_one,cupy,vllm,jax,soak limit=600
while getopts a:c:l: option; do
    case $option in a) audit=$OPTARG ;; c) clients=$OPTARG ;; l) limit=$OPTARG ;; *) usage ;; esac
done
shift $((OPTIND - 1))
(($# >= 2)) || usage
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
for pair in "$@"; do [[ $pair = *=* ]] || usage; done

client() { # NAME: its command
    case $1 in
        torch) echo "torchrun --nproc-per-node 2 --master-port 29611 $here/torch_checks.py" ;;
        torch_lazy) echo "torchrun --nproc-per-node 2 --master-port 29612 $here/torch_checks.py --lazy --only all_reduce_types,messages_types,graphs,many_groups" ;;
        torch_one) echo "python3 $here/torch_one_process.py" ;;
        cupy) echo "python3 $here/cupy_checks.py" ;;
        vllm) echo "python3 $here/vllm_like.py" ;;
        jax) echo "python3 $here/jax_checks.py" ;;
        soak) echo "python3 $here/graph_soak.py --minutes 1" ;;
        *) echo "unknown client $1" >&2; return 2 ;;
    esac
}

echo "client,library,check,outcome" > "$out/checks.csv"
for client in ${clients//,/ }; do
    command=$(client "$client")
    for pair in "$@"; do
        name=${pair%%=*} library=${pair#*=} log=$out/$client.${pair%%=*}.log status=0 begin=$SECONDS
        with=()
        [[ -n $library ]] && with=("LD_PRELOAD=$library")
        # What JAX opens by its path becomes our library in the same place of the process.
        [[ -n $library && $client = jax && -n $audit ]] && with=("LD_AUDIT=$audit" "TINYNCCL_NCCL_LIBRARY=$library")
        echo "== $client over $name"
        # shellcheck disable=SC2086 # a command and its arguments
        env ${with[@]+"${with[@]}"} timeout -k 10 "$limit" $command > "$log" 2> "$log.err" < /dev/null || status=$?
        grep -E '^(FAILED|skipped|note) |checks, ' "$log" || true
        ((status == 0)) || echo "exit status $status: see $log and $log.err"
        echo "$(grep -c '^ok ' "$log" || true) ok, $((SECONDS - begin)) s"
        awk -v client="$client" -v library="$name" '
            $1 == "ok" || $1 == "FAILED" || $1 == "skipped" { sub(/:$/, "", $2); print client "," library "," $2 "," $1 }' "$log" >> "$out/checks.csv"
    done
done
python3 - "$out/checks.csv" "${1%%=*}" <<'END'
import csv, sys

rows = list(csv.DictReader(open(sys.argv[1])))
libraries = list(dict.fromkeys(row["library"] for row in rows))
outcomes = {}
for row in rows:
    outcomes.setdefault((row["client"], row["check"]), {})[row["library"]] = row["outcome"]
print("\n| Client | " + " | ".join(f"{library}: ok, skipped, FAILED, not run" for library in libraries) + " |")
print("|---|" + "---|" * len(libraries))
for client in dict.fromkeys(client for client, _ in outcomes):
    counts = []
    for library in libraries:
        ends = [found.get(library, "not run") for (c, _), found in outcomes.items() if c == client]
        counts.append(", ".join(str(ends.count(end)) for end in ("ok", "skipped", "FAILED", "not run")))
    print(f"| {client} | " + " | ".join(counts) + " |")
worse = [(key, library) for key, found in outcomes.items() for library in libraries if found.get(sys.argv[2]) == "ok" and found.get(library) != "ok"]
for (client, check), library in worse:
    print(f"FAILED {client} {check}: ok over {sys.argv[2]}, {outcomes[client, check].get(library, 'not run')} over {library}")
sys.exit(1 if worse or not rows else 0)
END

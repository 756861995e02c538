#!/usr/bin/env python3
"""Collectives in networks of network namespaces: the library's choice beside schedules that are made for the links,
Open MPI and Gloo, in turn.

  scripts/topologies/run.py [--rounds N] [--sizes 1M,16M] [--scale F] [--csv FILE] [--peers] [TOPOLOGY.toml...]

Each node of a description (docs/topologies; all of them by default) is a namespace, with a bridge if it has no ranks;
each link is a pair of veth with the link's rate times --scale (`tc tbf`): two cores do not move what real links do.
Latency is what the namespaces have. A rank is a process of `stress`, built by `cargo build --release -p stress -p
tinynccl-cli`. Times are medians of rounds in turn; `of` compares with the bound of `tinynccl-cli simulate`, in payload
of the links (0.955 of the rate: headers of Ethernet, IP and TCP). Between hosts without a switch the library has no
routes: its ranks relay. Peers get routes there.

Needs ip, tc, unshare, nsenter; user namespaces where it is not run by root. --peers needs mpicc.openmpi, libgloo-dev.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import tomllib

from network import Network

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("BIN", ROOT / "target" / "release"))
PEERS = ROOT / "target" / "peers"
PAYLOAD = 0.955
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]


def measured(network, arguments, variables):
    """The median time in microseconds of a run of `stress` by the ranks of the network, as rank 0 prints it."""
    with tempfile.TemporaryDirectory() as folder:
        def command(rank):
            return [BIN / "stress", *arguments, "--place", "out", "--no-pin",
                    *(["--json", f"{folder}/out.json"] if rank == 0 else [])]
        network.run(command, {"TINYNCCL_SECRET": "one network of namespaces", "TINYNCCL_TUNE": "off",
                              "TINYNCCL_IFNAME": "l", "MASTER_PORT": "29400", **variables})
        with open(f"{folder}/out.json") as file:
            found = json.load(file)
    (row,) = found["rows"]
    if found["wrong"]:
        raise RuntimeError(f"wrong values: {row}")
    return row["out_of_place"]["median"] * 1e6


def stress(network, collective, size, **environment):
    """Microseconds of a call of `stress` with one rank per rank of the network."""
    arguments = ["--collective", collective, "-b", size, "-e", size, "-n", "3", "-w", "1", "--repetitions", "3",
                 *(["--transport", "tcp"] if network.one_rank_each else [])]
    return measured(network, arguments, environment)


def peer_options(network, collective, size):
    # Sizes as nccl-tests has them: those of `stress`, and of the peers' programs, which want bytes.
    number = int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]
    return ["-o", collective, "-b", str(number), "-e", str(number), "-t", "1.5", "-r", "3", "-a", "-T", "250"]


def microseconds(text, collective):
    """The median in the output of a peer's program."""
    for line in text.splitlines():
        words = line.split(",")
        if words[0] == collective:
            return float(words[4])
    raise RuntimeError(f"no figure of {collective} in: {text}")


def open_mpi(network, collective, size):
    with tempfile.TemporaryDirectory() as folder:
        agent = pathlib.Path(folder) / "agent"
        lines = [f"  {address}) exec nsenter -t {network.pid(host)} -n -u sh -c \"$*\" ;;"
                 for host, address in network.addresses.items()]
        agent.write_text("#!/bin/sh\nhost=$1\nshift\ncase $host in\n" + "\n".join(lines) + "\nesac\n")
        agent.chmod(0o755)
        slots = ",".join(f"{network.addresses[host]}:{network.ranks_of(host)}" for host in network.hosts)
        first = network.hosts[0]
        words = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-H", slots, "-n", str(network.ranks),
                 "--mca", "plm_rsh_agent", agent, "--mca", "pml", "ob1", "--mca", "btl", "tcp,vader,self",
                 "--mca", "btl_tcp_if_include", network.subnet, "--mca", "oob_tcp_if_include", network.subnet,
                 "--mca", "btl_vader_single_copy_mechanism", "none", "--bind-to", "none",
                 PEERS / "mpi_perf.openmpi", *peer_options(network, collective, size)]
        found = network.within(first, *words, capture_output=True, text=True, timeout=300)
    return microseconds(found.stdout, collective)


def gloo(network, collective, size):
    with tempfile.TemporaryDirectory() as folder:
        def command(rank):
            return [PEERS / "gloo_perf", "-n", str(network.ranks), *peer_options(network, collective, size)]
        variables = {"GLOO_DIRECTORY": folder, "GLOO_INTERFACE": network.interface_of}
        return microseconds(network.run(command, variables), collective)


def build_peers():
    PEERS.mkdir(parents=True, exist_ok=True)
    sources = ROOT / "scripts" / "peers"
    flags = ["-O3", "-march=native"]
    subprocess.run(["mpicc.openmpi", *flags, "-o", PEERS / "mpi_perf.openmpi", sources / "mpi_perf.c", "-lm"], check=True)
    subprocess.run(["c++", *flags, "-o", PEERS / "gloo_perf", sources / "gloo_perf.cc", "-lgloo", "-lpthread"], check=True)


def bound(topology, collective, ranks, size):
    text = subprocess.run([BIN / "tinynccl-cli", "simulate", collective.replace("_", "-"), "-n", str(ranks), "-s", size,
                           "-t", topology, "--algo", "direct", "--format", "json"],
                          check=True, capture_output=True, text=True).stdout
    return json.loads(text)[0]["limit_us"] / PAYLOAD


def scaled(description, factor):
    """The description with all rates times `factor`."""
    scaled = json.loads(json.dumps(description))
    scaled.pop("costs", None)
    for thing in [*scaled["link"], *scaled.get("shared", [])]:
        thing["bandwidth_gb_s"] *= factor
    return scaled


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="1M,16M")
    parser.add_argument("--scale", type=float, default=0.05)
    parser.add_argument("--csv")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("topologies", nargs="*")
    options = parser.parse_args()
    if options.peers:
        build_peers()
    names = ["today", "fitted"] + (["Open MPI", "Gloo"] if options.peers else [])
    rows = ["topology,collective,bytes,bound_us," + ",".join(name.lower().replace(" ", "_") + "_us" for name in names)]
    print("| topology | collective | bytes | bound ms | " + " | ".join(f"{name} ms | of" for name in names) + " | gain |")
    print("|---|---|--:|--:|" + "--:|--:|" * len(names) + "--:|")
    for topology in options.topologies or sorted((ROOT / "docs" / "topologies").glob("*.toml")):
        topology = pathlib.Path(topology).resolve()
        with open(topology, "rb") as file:
            description = scaled(tomllib.load(file), options.scale)
        with Network(description) as network, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(description, file)
            file.flush()
            kinds = {
                "today": stress,
                "fitted": lambda *call: stress(*call, TINYNCCL_TOPOLOGY=file.name),
                "Open MPI": open_mpi,
                "Gloo": gloo,
            }
            for collective in options.collectives.split(","):
                for size in options.sizes.split(","):
                    times = {name: [] for name in names}
                    for _ in range(options.rounds):
                        for name in names:
                            try:
                                times[name].append(kinds[name](network, collective, size))
                            except (RuntimeError, subprocess.SubprocessError) as error:
                                if name in ("today", "fitted"):
                                    raise
                                print(f"run.py: {name}: {error}", file=sys.stderr)
                                times[name].append(float("nan"))
                    found = [statistics.median(times[name]) for name in names]
                    least = bound(file.name, collective, network.ranks, size)
                    rows.append(f"{topology.stem},{collective},{size},{least:.0f}," + ",".join(f"{t:.0f}" for t in found))
                    print(f"| {topology.stem} | {collective} | {size} | {least / 1e3:.1f} | " +
                          " | ".join(f"{t / 1e3:.1f} | {least / t:.2f}" for t in found) +
                          f" | {found[0] / found[1]:.2f} |", flush=True)
    if options.csv:
        pathlib.Path(options.csv).write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    if os.environ.get("TOPOLOGIES_INSIDE") is None:
        os.environ["TOPOLOGIES_INSIDE"] = "1"
        os.execvp("unshare", ["unshare", "-Urn", sys.executable, __file__, *sys.argv[1:]])
    main()

#!/usr/bin/env python3
"""Collectives in networks of network namespaces: the library's choice beside trees that are packed for the links.

  scripts/topologies/run.py [--rounds N] [--sizes 1M,16M] [--csv FILE] [--transport tcp] TOPOLOGY.toml...

Each node of a description (docs/topologies) is a namespace, with a bridge if it has no ranks; each link is a pair of
veth with the link's rate (`tc tbf`). Latency is what the namespaces have. With --transport auto the ranks of
a node share memory, and the library's choice between nodes is hierarchical. A rank is a process of `stress`, built by
`cargo build --release -p stress`. Times are medians of rounds in turn; `of` compares with the bound of
`tinynccl-cli simulate`, in payload of the links (0.955 of the rate: headers of Ethernet, IP and TCP).

Needs ip, tc, unshare, nsenter; user namespaces where it is not run by root.
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("BIN", ROOT / "target" / "release"))
PAYLOAD = 0.955
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]


def run(*words, **options):
    return subprocess.run([str(word) for word in words], check=True, **options)


class Network:
    """The namespaces of a description, while it is used as a context."""

    def __init__(self, description):
        self.nodes, self.links = description["node"], description["link"]
        self.processes = {}

    def within(self, node, *words, **options):
        return run("nsenter", "-t", self.processes[node].pid, "-n", *words, **options)

    def __enter__(self):
        ours = os.readlink("/proc/self/ns/net")
        for node in self.nodes:
            process = subprocess.Popen(["unshare", "-n", "sleep", "3600"])
            self.processes[node["name"]] = process
            while os.readlink(f"/proc/{process.pid}/ns/net") == ours:
                pass
        switches = {node["name"] for node in self.nodes if not node.get("ranks")}
        self.hosts = [node["name"] for node in self.nodes if node.get("ranks")]
        for node in self.nodes:
            self.within(node["name"], "ip", "link", "set", "lo", "up")
        for switch in switches:
            self.within(switch, "ip", "link", "add", "name", "bridge0", "type", "bridge")
            self.within(switch, "ip", "link", "set", "bridge0", "up")
        for number, link in enumerate(self.links):
            ends = link["between"]
            pids = [self.processes[end].pid for end in ends]
            run("ip", "link", "add", f"l{number}", "netns", pids[0], "type", "veth", "peer", f"l{number}", "netns", pids[1])
            rate = f"{round(link['bandwidth_gb_s'] * 8e6)}kbit"
            for end, address in zip(ends, (1, 2)):
                self.within(end, "tc", "qdisc", "add", "dev", f"l{number}", "root", "tbf",
                            "rate", rate, "burst", "64kb", "latency", "30ms")
                self.within(end, "ip", "link", "set", f"l{number}", "up")
                if end in switches:
                    self.within(end, "ip", "link", "set", f"l{number}", "master", "bridge0")
                elif switches & set(ends):
                    self.within(end, "ip", "addr", "add", f"10.77.0.{self.hosts.index(end) + 1}/24", "dev", f"l{number}")
                else:
                    self.within(end, "ip", "addr", "add", f"10.78.{number}.{address}/30", "dev", f"l{number}")
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def store(self):
        """An address of rank 0 that each host reaches: that of the switched network, or of any of its links."""
        text = self.within(self.hosts[0], "ip", "-j", "addr", capture_output=True, text=True).stdout
        addresses = [a["local"] for link in json.loads(text) for a in link["addr_info"] if a["family"] == "inet"]
        return [address for address in addresses if address != "127.0.0.1"]

    def stress(self, arguments, environment):
        ranks = [node["name"] for node in self.nodes for _ in range(node.get("ranks", 0))]
        with tempfile.TemporaryDirectory() as folder:
            processes = []
            for rank, host in enumerate(ranks):
                variables = {"RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_RANK": ranks[:rank].count(host),
                             "MASTER_ADDR": self.store()[0], "MASTER_PORT": 29400, "TINYNCCL_TUNE": "off",
                             **environment}
                variables = {name: str(value) for name, value in variables.items()}
                words = ["nsenter", "-t", str(self.processes[host].pid), "-n", str(BIN / "stress"), *arguments]
                if rank == 0:
                    words += ["--json", f"{folder}/out.json"]
                quiet = {} if os.environ.get("LOUD") else {"stdout": subprocess.DEVNULL}
                processes.append(subprocess.Popen(words, env={**os.environ, **variables}, **quiet))
            for process in processes:
                if process.wait(timeout=300):
                    raise RuntimeError(f"a rank ended with {process.returncode}")
            with open(f"{folder}/out.json") as file:
                return json.load(file)


def bound(topology, collective, ranks, size):
    text = run(BIN / "tinynccl-cli", "simulate", collective.replace("_", "-"), "-n", ranks, "-s", size, "-t", topology,
               "--algo", "direct", "--format", "json", capture_output=True, text=True).stdout
    return json.loads(text)[0]["limit_us"] / PAYLOAD


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="1M,16M")
    parser.add_argument("--csv")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("topologies", nargs="+")
    options = parser.parse_args()
    rows = ["topology,collective,bytes,bound_us,today_us,packed_us"]
    print("| topology | collective | bytes | bound ms | today ms | of | packed ms | of | gain |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for topology in options.topologies:
        topology = pathlib.Path(topology).resolve()
        with open(topology, "rb") as file:
            description = tomllib.load(file)
        ranks = sum(node.get("ranks", 0) for node in description["node"])
        with Network(description) as network:
            for collective in COLLECTIVES:
                for size in options.sizes.split(","):
                    times = {"today": [], "packed": []}
                    for _ in range(options.rounds):
                        for name, environment in [("today", {}), ("packed", {"TINYNCCL_TOPOLOGY": topology})]:
                            arguments = ["--collective", collective, "-b", size, "-e", size, "-n", "3", "-w", "1",
                                         "--repetitions", "3", "--place", "out", "--no-pin", "--transport", options.transport]
                            found = network.stress(arguments, environment)
                            times[name].append(median_us(found))
                    [today, packed] = [statistics.median(times[name]) for name in ("today", "packed")]
                    least = bound(topology, collective, ranks, size)
                    rows.append(f"{topology.stem},{collective},{size},{least:.0f},{today:.0f},{packed:.0f}")
                    print(f"| {topology.stem} | {collective} | {size} | {least / 1e3:.1f} | {today / 1e3:.1f} |"
                          f" {least / today:.2f} | {packed / 1e3:.1f} | {least / packed:.2f} | {today / packed:.2f} |",
                          flush=True)
    if options.csv:
        pathlib.Path(options.csv).write_text("\n".join(rows) + "\n")


def median_us(found):
    """Microseconds of a call in the JSON of `stress`."""
    (row,) = found["rows"]
    if found["wrong"]:
        raise RuntimeError(f"wrong values: {row}")
    return row["out_of_place"]["median"] * 1e6


if __name__ == "__main__":
    if os.environ.get("TOPOLOGIES_INSIDE") is None:
        os.environ["TOPOLOGIES_INSIDE"] = "1"
        os.execvp("unshare", ["unshare", "-Urn", sys.executable, __file__, *sys.argv[1:]])
    main()

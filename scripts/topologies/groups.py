#!/usr/bin/env python3
"""Two groups of ranks that use the links at the same time: schedules made for both beside schedules made for each alone.

  scripts/topologies/groups.py [--rounds N] [--sizes 1M,4M] [--scale F] [--csv FILE]

Six hosts in a ring, and on a switch; two of them have two ranks. One group is a rank of each host, the other one the
second ranks of the first two hosts. *aware*: both are split from one communicator, whose machine TINYNCCL_TOPOLOGY
describes. *unaware*: two jobs, each with a description of its own ranks alone. Times of all_reduces are those of a group
while the other one makes calls, too; medians of rounds in turn. Needs what run.py needs.
"""

import argparse
import concurrent.futures
import copy
import json
import os
import pathlib
import statistics
import sys
import tempfile

from network import Network
from run import measured, scaled

RANKS = [2, 2, 1, 1, 1, 1]
PAIR, ALL = [1, 3], [0, 2, 4, 5, 6, 7]


def machine(shape):
    hosts = [f"host{at}" for at in range(len(RANKS))]
    inside = {"latency_us": 0.2, "bandwidth_gb_s": 20.0}
    nodes = [{"name": name, "ranks": ranks, "inside": inside} for name, ranks in zip(hosts, RANKS)]
    others = [*hosts[1:], hosts[0]] if shape == "ring" else ["switch"] * len(hosts)
    if shape == "star":
        nodes.append({"name": "switch"})
    links = [{"between": [a, b], "latency_us": 5.0, "bandwidth_gb_s": 1.0} for a, b in zip(hosts, others)]
    return {"name": shape, "node": nodes, "link": links}


def alone(description, group):
    """The description with the ranks of one group, in its order."""
    own = copy.deepcopy(description)
    places = [node["name"] for node in description["node"] for _ in range(node.get("ranks", 0))]
    for node in own["node"]:
        ranks = sum(places[rank] == node["name"] for rank in group)
        if node.pop("ranks", 0) and ranks:
            node["ranks"] = ranks
    return own


class Part(Network):
    """Ranks of a network that make a job of their own."""

    def __init__(self, network, group):
        self.__dict__.update(network.__dict__)
        self.places = [network.places[rank] for rank in group]
        self.ranks = len(group)
        self.hosts = [host for host in network.hosts if host in self.places]


def job(network, size, port, description, *options):
    """Microseconds of rank 0's group of a job."""
    arguments = ["--collective", "all_reduce", "-b", size, "-e", size, "--budget", "3", "--repetitions", "5", *options]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(description, file)
        file.flush()
        return measured(network, arguments, {"MASTER_PORT": port, "TINYNCCL_TOPOLOGY": file.name})


def unaware(network, description, size):
    def one(group, port):
        return job(Part(network, group), size, port, alone(description, group))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(one, (ALL, PAIR), (29400, 29500)))


def aware(network, description, size):
    # Rank 0's group prints; hosts 0 and 1 have the same links, and either of their ranks may be in the pair.
    return [job(network, size, 29400, description, "--split", ranks) for ranks in ("1,3", "0,2")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="1M,4M")
    parser.add_argument("--scale", type=float, default=0.05)
    parser.add_argument("--csv")
    options = parser.parse_args()
    rows = ["machine,group,bytes,alone_us,unaware_us,aware_us"]
    print("| machine | group | bytes | alone ms | unaware ms | aware ms | gain |\n|---|---|--:|--:|--:|--:|--:|")
    for shape in ("ring", "star"):
        description = scaled(machine(shape), options.scale)
        with Network(description) as network:
            for size in options.sizes.split(","):
                found = {"alone": [], "unaware": [], "aware": []}
                for _ in range(options.rounds):
                    found["alone"].append([job(Part(network, group), size, 29400, alone(description, group))
                                           for group in (ALL, PAIR)])
                    found["unaware"].append(unaware(network, description, size))
                    found["aware"].append(aware(network, description, size))
                for at, group in enumerate(("one rank of each host", "the pair")):
                    own, one, other = (statistics.median(times[at] for times in found[kind])
                                       for kind in ("alone", "unaware", "aware"))
                    rows.append(f"{shape},{group},{size},{own:.0f},{one:.0f},{other:.0f}")
                    print(f"| {shape} | {group} | {size} | {own / 1e3:.1f} | {one / 1e3:.1f} | {other / 1e3:.1f} | {one / other:.2f} |",
                          flush=True)
    if options.csv:
        pathlib.Path(options.csv).write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    if os.environ.get("TOPOLOGIES_INSIDE") is None:
        os.environ["TOPOLOGIES_INSIDE"] = "1"
        os.execvp("unshare", ["unshare", "-Urn", sys.executable, __file__, *sys.argv[1:]])
    main()

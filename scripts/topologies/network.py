"""Networks of network namespaces, made from descriptions of machines (docs/topologies)."""

import collections
import os
import subprocess
import sys


# The same for all programs. BBR takes the burst that `tbf` lets pass for the rate of the link, and then stops for tens of
# milliseconds. Namespaces may choose cubic where the machine's net.ipv4.tcp_allowed_congestion_control has it.
CONGESTION = "for name in cubic reno; do echo $name 2>&- > /proc/sys/net/ipv4/tcp_congestion_control && break; done 2>&-"


def run(*words, **options):
    return subprocess.run([str(word) for word in words], check=True, **options)


class Network:
    """The namespaces of a description, while it is used as a context.

    Hosts on one switched network have an interface each, l0 and so on, in 10.77.0.0/24. Others have an interface per
    link, with a subnet of its own, and an address in 10.80.0.0/24 that the others reach by routes of least hops.
    """

    def __init__(self, description):
        self.nodes, self.links = description["node"], description["link"]
        self.hosts = [node["name"] for node in self.nodes if node.get("ranks")]
        self.switches = {node["name"] for node in self.nodes if not node.get("ranks")}
        self.places = [node["name"] for node in self.nodes for _ in range(node.get("ranks", 0))]
        self.ranks = len(self.places)
        self.one_rank_each = self.ranks == len(self.hosts)
        self.processes = {}
        self.addresses = {}
        self.subnet = "10.77.0.0/24" if self.switches else "10.80.0.0/24"

    def pid(self, node):
        return self.processes[node].pid

    def ranks_of(self, host):
        return self.places.count(host)

    def within(self, node, *words, **options):
        return run("nsenter", "-t", self.pid(node), "-n", "-u", *words, **options)

    def __enter__(self):
        try:
            self.build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def build(self):
        ours = os.readlink("/proc/self/ns/uts")
        for node in self.nodes:
            process = subprocess.Popen(["unshare", "-n", "-u", "sleep", "7200"], stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
            self.processes[node["name"]] = process
            while os.readlink(f"/proc/{process.pid}/ns/uts") == ours:
                pass
        for node in self.nodes:
            self.within(node["name"], "hostname", node["name"])
            self.within(node["name"], "ip", "link", "set", "lo", "up")
            self.within(node["name"], "sh", "-c", CONGESTION)
        for switch in self.switches:
            self.within(switch, "ip", "link", "add", "name", "bridge0", "type", "bridge")
            self.within(switch, "ip", "link", "set", "bridge0", "up")
        for number, link in enumerate(self.links):
            self.connect(number, link)
        if not self.switches:
            self.add_routes()

    def connect(self, number, link):
        ends = link["between"]
        name = f"l{number}"
        run("ip", "link", "add", name, "netns", self.pid(ends[0]), "type", "veth", "peer", name,
            "netns", self.pid(ends[1]))
        rate = round(link["bandwidth_gb_s"] * 8e6)
        # A burst of a millisecond, and of two of the largest packets at least.
        burst = max(rate // 8, 131072)
        for end, address in zip(ends, (1, 2)):
            self.within(end, "tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", f"{rate}kbit",
                        "burst", burst, "latency", "30ms")
            self.within(end, "ip", "link", "set", name, "up")
            if end in self.switches:
                self.within(end, "ip", "link", "set", name, "master", "bridge0")
            elif self.switches & set(ends):
                self.addresses[end] = f"10.77.0.{self.hosts.index(end) + 1}"
                self.within(end, "ip", "addr", "add", f"{self.addresses[end]}/24", "dev", name)
            else:
                self.within(end, "ip", "addr", "add", f"10.78.{number}.{address}/30", "dev", name)

    def add_routes(self):
        beside = collections.defaultdict(list)
        for number, link in enumerate(self.links):
            for end, (other, address) in zip(link["between"], zip(reversed(link["between"]), (2, 1))):
                beside[end].append((other, f"10.78.{number}.{address}"))
        for number, host in enumerate(self.hosts):
            self.addresses[host] = f"10.80.0.{number + 1}"
            self.within(host, "ip", "link", "add", "name", "d0", "type", "bridge")
            self.within(host, "ip", "addr", "add", f"{self.addresses[host]}/32", "dev", "d0")
            self.within(host, "ip", "link", "set", "d0", "up")
            self.within(host, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for host in self.hosts:
            first = {host: None}
            queue = collections.deque([host])
            while queue:
                at = queue.popleft()
                for other, address in beside[at]:
                    if other not in first:
                        first[other] = first[at] or address
                        queue.append(other)
            for other, address in first.items():
                if address:
                    self.within(host, "ip", "route", "add", f"{self.addresses[other]}/32", "via", address,
                                "src", self.addresses[host])

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def interface_of(self, host):
        """The interface whose address the other hosts reach."""
        numbers = (number for number, link in enumerate(self.links) if host in link["between"])
        return f"l{next(numbers)}" if self.switches else "d0"

    def run(self, command, variables):
        """Runs `command(rank)` on all ranks; returns what rank 0 prints. Variables may be functions of the host."""
        processes = []
        for rank, host in enumerate(self.places):
            own = {"RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_RANK": self.places[:rank].count(host),
                   "MASTER_ADDR": self.addresses[self.hosts[0]], **variables}
            own = {name: str(value(host) if callable(value) else value) for name, value in own.items()}
            words = ["nsenter", "-t", str(self.pid(host)), "-n", "-u", *(str(word) for word in command(rank))]
            processes.append(subprocess.Popen(words, env={**os.environ, **own}, text=True,
                                              stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL))
        text = ""
        try:
            text = processes[0].communicate(timeout=300)[0]
            for process in processes:
                if process.wait(timeout=60):
                    raise RuntimeError(f"a rank ended with {process.returncode}")
        finally:
            for process in processes:
                process.kill()
        if os.environ.get("LOUD"):
            print(text, file=sys.stderr)
        return text

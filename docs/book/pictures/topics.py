"""Pictures of the topics: paths of a tensor, pipelines, overlap, times over sizes."""

import re
from pathlib import Path

from kit import Axes, Picture

RECORD = Path(__file__).parents[2] / "benchmarks/2026-11-21-gpu-collectives.md"


def recorded(title):
    """Rows of a table of the record of two H200s: bytes, our microseconds, NCCL's."""
    part = RECORD.read_text().split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if re.match(r"\| \d", line)]
    return [(int(row[0]), float(row[1]), float(row[4])) for row in rows]


def sizes(words):
    return [(2 ** power, name) for power, name in words]


def time_over_size():
    """Log-log: a floor, then a slope."""
    p = Picture(330, "Time of an all_reduce over its size on two H200s, both axes logarithmic: flat up to 64 KiB, then as steep as the size.")
    rows = recorded("all_reduce, f32, plain launches")
    axes = Axes(p, (70, 20, 620, 240), (8, 2 ** 29), (1, 4000))
    axes.ticks(sizes([(3, "8 B"), (10, "1 KiB"), (15, "32 KiB"), (20, "1 MiB"), (25, "32 MiB"), (29, "512 MiB")]),
               [(10, "10 µs"), (100, "100 µs"), (1000, "1 ms")])
    axes.curve([(size, theirs) for size, _, theirs in rows], "line thick l3")
    axes.curve([(size, ours) for size, ours, _ in rows], "line thick l0")
    for size, ours, _ in rows:
        p.dot(*axes.at(size, ours), 3.5, "full r0")
    p.text(*axes.at(1024, 2.0), "tinynccl: 4.4 µs, whatever the size: α", "s")
    p.text(*axes.at(1024, 12), "NCCL 2.28.9", "s")
    x, y = axes.at(2 ** 25, 600)
    p.text(x - 14, y, "as steep as the size: S / B", "s", "end")
    p.text(380, 318, "size of the buffer, two H200s", "s")
    return p


def busbw_over_size():
    """The same record, as a rate: a roof."""
    p = Picture(330, "Busbw of an all_reduce over its size on two H200s: it rises with the size and nears the rate of the links.")
    rows = [row for row in recorded("all_reduce, f32, plain launches") if row[0] >= 2048]
    axes = Axes(p, (70, 20, 620, 240), (2048, 2 ** 29), (0.2, 900))
    axes.ticks(sizes([(11, "2 KiB"), (15, "32 KiB"), (20, "1 MiB"), (25, "32 MiB"), (29, "512 MiB")]),
               [(1, "1 GB/s"), (10, "10"), (100, "100")])
    axes.curve([(2048, 364), (2 ** 29, 364)], "line dash l2")
    p.text(*axes.at(2 ** 16, 450), "364 GB/s: a kernel that only writes", "s")
    axes.curve([(2048, 2048 / 4.3e3), (364 * 4.3e3, 364)], "line dash")
    x, y = axes.at(2 ** 16, 16)
    p.text(x - 16, y - 14, "S / α", "s", "end")
    axes.curve([(size, size / theirs / 1e3) for size, _, theirs in rows], "line thick l3")
    axes.curve([(size, size / ours / 1e3) for size, ours, _ in rows], "line thick l0")
    p.text(*axes.at(2 ** 26, 40), "tinynccl (blue), NCCL (orange)", "s")
    p.text(380, 318, "size of the buffer, two H200s; the roof is the link, the slope the latency", "s")
    return p


def pipeline():
    p = Picture(310, "Three hops of one large message one after the other, and the same message in four chunks that overlap.")
    for title, top in (("one message, three hops", 30), ("four chunks, three hops", 168)):
        p.text(20, top, title, "b", "start")
        for hop in range(3):
            p.text(20, top + 32 + hop * 32, f"link {hop}", "s", "start")
    for hop in range(3):
        p.cell(90 + hop * 200, 44 + hop * 32, 198, 26, "S", hop)
    for hop in range(3):
        for chunk in range(4):
            p.cell(90 + (hop + chunk) * 50, 182 + hop * 32, 48, 26, str(chunk), hop)
    p.line([(390, 176), (390, 282)], "line dash l3")
    p.text(400, 200, "half the time: every link works at once", "s", "start")
    p.arrow((90, 290), (690, 290))
    p.text(660, 306, "time", "s")
    return p


def paths_of_a_tensor():
    p = Picture(360, "Inside a host a tensor goes by peer memory, shared memory or host memory; between hosts by RDMA or sockets.")
    for host, x in (("host A", 16), ("host B", 476)):
        p.frame(x, 16, 228, 300, host)
    p.box(36, 56, 80, 44, "GPU 0", "full r0")
    p.box(144, 56, 80, 44, "GPU 1", "full r0")
    p.arrow((118, 78), (142, 78), kind="line thick l0")
    p.text(130, 70, "1", "s")
    p.box(36, 150, 188, 40, "host memory", "pale r1")
    p.arrow((60, 102), (60, 148), kind="line l1")
    p.arrow((204, 148), (204, 102), kind="line l1")
    p.text(130, 132, "2", "s")
    p.box(36, 250, 188, 44, "network card", "full r2")
    p.arrow((28, 102), (28, 272), (34, 272), kind="line l2")
    p.arrow((130, 192), (130, 248), kind="line l3")
    p.box(496, 56, 80, 44, "GPU 2", "full r0")
    p.box(496, 150, 188, 40, "host memory", "pale r1")
    p.box(496, 250, 188, 44, "network card", "full r2")
    p.arrow((488, 272), (482, 272), (482, 120), (520, 102), kind="line l2")
    p.arrow((600, 248), (600, 192), kind="line l3")
    p.arrow((226, 264), (494, 264), kind="line thick l2")
    p.text(360, 254, "3 RDMA: card to card", "s")
    p.arrow((226, 286), (494, 286), kind="line thick l3")
    p.text(360, 306, "4 sockets: over both kernels", "s")
    p.text(360, 346, "1 peer memory, NVLink. 2 shared memory: two copies. 3 with GPUDirect: none. 4: two and more.", "s")
    return p


def eight_gpus():
    p = Picture(370, "A host of eight GPUs, four switches for two GPUs and two cards each, and two rings in opposite order through all GPUs.")
    p.frame(16, 14, 688, 310)
    for socket in range(2):
        x = 36 + socket * 340
        p.box(x, 30, 308, 34, f"processor {socket}", "pale r3")
        for switch in range(2):
            sx = x + switch * 158
            p.box(sx, 92, 150, 30, "PCIe switch", "pale r2")
            p.line([(sx + 75, 64), (sx + 75, 92)])
            for unit in range(2):
                ux = sx + unit * 78
                number = socket * 4 + switch * 2 + unit
                p.cell(ux, 146, 52, 28, f"card {number}", 1, pale=True)
                p.box(ux, 206, 72, 40, f"GPU {number}", "full r0")
                p.line([(ux + 24, 122), (ux + 24, 146)])
                p.line([(ux + 62, 122), (ux + 62, 206)])
    p.line([(344, 47), (376, 47)])
    centre = lambda n: 36 + (n // 4) * 340 + (n % 4 // 2) * 158 + (n % 2) * 78 + 36
    for n in range(7):
        p.arrow((centre(n) + 12, 248), (centre(n) + 12, 262), (centre(n + 1) - 12, 262), (centre(n + 1) - 12, 249), kind="line l0")
    p.arrow((centre(7) + 12, 248), (centre(7) + 12, 290), (centre(0) - 12, 290), (centre(0) - 12, 249), kind="line l0")
    p.text(360, 312, "NVLink: one ring through all GPUs; a second one runs the other way", "s")
    p.text(360, 352, "Each GPU reaches the network through the card below its own switch: that card's network is its rail.", "s")
    return p


def overlap():
    p = Picture(300, "Backward and all_reduces one after the other, and with the all_reduce of each bucket beside backward.")
    for title, top in (("one all_reduce at the end", 30), ("buckets, averaged beside backward", 152)):
        p.text(20, top, title, "b", "start")
        p.text(20, top + 34, "compute", "s", "start")
        p.text(20, top + 70, "network", "s", "start")
    p.cell(100, 46, 120, 28, "forward", 2)
    p.cell(222, 46, 198, 28, "backward", 0)
    p.cell(422, 82, 200, 28, "all gradients", 1)
    p.cell(624, 46, 60, 28, "step", 3)
    p.cell(100, 168, 120, 28, "forward", 2)
    for i in range(4):
        p.cell(222 + i * 50, 168, 48, 28, f"b {3 - i}", 0)
        p.cell(273 + i * 50, 204, 48, 28, str(i), 1)
    p.cell(474, 168, 60, 28, "step", 3)
    p.line([(422, 240), (422, 248), (472, 248), (472, 240)], "line l3")
    p.text(447, 266, "exposed", "s")
    p.arrow((100, 284), (690, 284))
    p.text(664, 300, "time", "s")
    return p


def gains():
    rows = (("kernels that write to the other GPU, not through hosts: 128 MiB", 5214, 396),
            ("waiting blocks that do not poll the host: broadcast of 8 MiB", 290, 31.7),
            ("a pipeline of chunks through the hosts' memory: 128 MiB", 28300, 5200),
            ("flags beside the data (LL): ring, 8 B", 12.10, 6.71),
            ("one CUDA graph in place of launches: 8 B", 4.38, 2.8),
            ("LL128 in place of Simple: 2 MiB", 15.9, 11.7),
            ("no copy into slots: broadcast of 128 MiB", 403, 374))
    p = Picture(30 + 40 * len(rows), "Measured gains: " + "; ".join(f"{name}: {before / after:.2g}" for name, before, after in rows))
    for i, (name, before, after) in enumerate(rows):
        y, factor = 14 + i * 40, before / after
        p.text(20, y + 12, name, "s", "start")
        p.rect(20, y + 18, 36 + factor * 37, 12, f"full r{i % 4}", 2)
        p.text(66 + factor * 37, y + 29, f"{factor:.1f} times as fast" if factor > 1.1 else f"{factor:.2f} times", "s", "start")
    return p


def flags():
    p = Picture(220, "Simple: data, a fence, then a flag. LL: each store of 8 bytes has 4 of data and 4 of flag. LL128: 120 bytes of data, 8 of flag.")
    for row, name in enumerate(("Simple", "LL", "LL128")):
        p.text(20, 48 + row * 62, name, "b", "start")
    p.cell(110, 28, 320, 30, "data, any length", 0)
    p.cell(436, 28, 60, 30, "fence", 3, pale=True)
    p.cell(502, 28, 60, 30, "flag", 3)
    p.text(580, 48, "two trips", "s", "start")
    for i in range(8):
        p.cell(110 + i * 57, 90, 26, 30, "4", 0)
        p.cell(137 + i * 57, 90, 26, 30, "4", 3)
    p.text(580, 110, "one trip, half data", "s", "start")
    p.cell(110, 152, 424, 30, "120", 0)
    p.cell(536, 152, 28, 30, "8", 3)
    p.text(580, 172, "one trip, 15/16", "s", "start")
    p.text(337, 210, "blue: data; orange: flag. The receiver polls the data itself.", "s")
    return p


def library():
    """The house: a row for each crate, a box for each module, in the colour of the milestones that introduce it."""
    rows = (
        ("tinynccl", (("shared_state 16", 3), ("ddp 13", 3), ("process_group 12", 3), ("launch 06", 0))),
        ("-cuda", (("driver 03", 2), ("peer 09", 2), ("kernels 09", 2), ("calls 14", 2))),
        ("-comm", (("start 06", 0), ("executor 07", 1), ("reduce 07", 1), ("calls 07", 1))),
        ("", (("engine 10", 1), ("symmetric 10", 1), ("verify 10", 1), ("membership 16", 3))),
        ("-transport", (("tcp 01", 0), ("bootstrap 06", 0), ("shm 06", 0), ("verbs 05, 08", 2))),
        ("-sys", (("config 06", 0), ("backoff 01", 0))),
        ("-plan", (("algorithm 07", 1), ("schedule 07", 1), ("simulate 07", 1), ("topology 10", 1))),
        ("softroce", (("card 02", 2), ("verbs names 02", 2))),
    )
    p = Picture(40 + 42 * len(rows) + 34, "The library's crates and modules, each with the number of the milestone that introduces it.")
    for i, (crate, modules) in enumerate(rows):
        y = 14 + i * 42
        p.text(16, y + 22, crate, "b", "start")
        for k, (name, rank) in enumerate(modules):
            p.cell(120 + k * 150, y, 142, 34, name, rank)
    for k, (words, rank) in enumerate((("bytes and ranks", 0), ("collectives", 1), ("RDMA and GPUs", 2), ("training", 3))):
        p.dot(130 + k * 150, 32 + 42 * len(rows), 6, f"full r{rank}")
        p.text(142 + k * 150, 37 + 42 * len(rows), words, "s", "start")
    return p


TOPICS = {
    "library": library,
    "gains": gains, "flags": flags,
    "10": time_over_size, "busbw": busbw_over_size, "pipeline": pipeline, "paths": paths_of_a_tensor,
    "eight-gpus": eight_gpus, "overlap": overlap,
}

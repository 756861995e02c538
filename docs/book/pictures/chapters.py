"""The opening pictures of the milestones' chapters."""

from math import cos, pi, sin

from kit import Picture


def tcp_echo():
    p = Picture(210, "Three messages of 5, 3 and 4 bytes are written into a stream and arrive in pieces of 2, 7 and 3 bytes.")
    p.text(20, 30, "three writes", "s", "start")
    x = 150
    for rank, size in enumerate((5, 3, 4)):
        p.cell(x, 14, size * 34 - 8, 24, f"message {rank + 1}", rank)
        x += size * 34 + 14
    p.text(20, 102, "one stream", "s", "start")
    for i in range(12):
        rank = 0 if i < 5 else 1 if i < 8 else 2
        first = i in (0, 5, 8)
        p.cell(150 + i * 38, 84, 36, 28, "len" if first else "", rank, pale=not first)
    p.arrow((620, 98), (690, 98), words="TCP")
    p.text(20, 174, "three reads", "s", "start")
    for at, size in ((0, 2), (2, 7), (9, 3)):
        p.rect(150 + at * 38, 156, size * 38 - 2, 26, "frame")
        p.text(150 + at * 38 + size * 19, 174, f"{size} bytes", "s")
    p.text(360, 204, "Only the length in front shows where a message ends.", "s")
    return p


def verbs_hello():
    p = Picture(230, "A program posts work to a queue of its card; the card sends it to the other card, which places it in a posted buffer.")
    for side, x, rank in (("sender", 20, 0), ("receiver", 470, 1)):
        p.frame(x, 16, 230, 190, side)
        p.box(x + 16, 52, 92, 46, "program", "pale r3")
        p.box(x + 120, 52, 94, 46, "memory", f"pale r{rank}")
        p.box(x + 16, 144, 198, 44, "card", "full r2")
    p.arrow((82, 98), (82, 144), words="")
    p.text(92, 126, "1 post send", "s", "start")
    p.arrow((532, 98), (532, 144))
    p.text(542, 126, "0 post receive", "s", "start")
    p.arrow((234, 166), (486, 166), kind="line l0", words="2 packets")
    p.arrow((640, 144), (640, 98), kind="line l1")
    p.arrow((508, 144), (508, 98))
    p.text(360, 224, "No kernel takes part: 3 the card writes into memory, 4 a completion notifies the program.", "s")
    return p


def cuda_vec_add():
    p = Picture(230, "Two arrays are copied to the GPU, thousands of threads add one element each, and the result is copied back.")
    p.frame(16, 20, 170, 176, "host memory")
    p.frame(280, 20, 420, 176, "GPU")
    for row, name in enumerate(("a", "b", "c")):
        y = 58 + row * 44
        for i in range(4):
            p.cell(40 + i * 32, y, 30, 26, f"{name}{i}", row)
    for block in range(3):
        x = 300 + block * 132
        p.text(x + 60, 66, f"block {block}", "s")
        for i in range(4):
            p.rect(x + i * 30, 76, 28, 84, "pale r2", 3)
            p.text(x + i * 30 + 14, 106, "+", "b")
            p.text(x + i * 30 + 14, 148, str(block * 4 + i), "s")
    p.arrow((190, 92), (276, 92), kind="line l0", words="copy")
    p.arrow((276, 162), (190, 162), kind="line l2", words="copy back")
    p.text(490, 184, "thread i: c[i] = a[i] + b[i]", "m")
    p.text(360, 220, "The two copies take longer than all additions.", "s")
    return p


def cuda_verbs():
    p = Picture(220, "From GPU memory to the network card: directly by peer access, or over a staging buffer in host memory.")
    p.box(20, 30, 150, 66, "GPU memory", "full r0")
    p.box(285, 130, 150, 60, "host memory", "pale r2", "staging buffer")
    p.box(550, 30, 150, 66, "network card", "full r1")
    p.arrow((174, 56), (546, 56), kind="line thick l0", words="GPUDirect RDMA: one transfer over PCIe")
    p.arrow((95, 100), (95, 160), (281, 160), kind="line thick l3")
    p.text(190, 150, "1 copy", "s")
    p.arrow((439, 160), (625, 160), (625, 100), kind="line thick l3")
    p.text(530, 150, "2 read", "s")
    p.text(360, 212, "The path over the host moves every byte twice, and works everywhere.", "s")
    return p


def rdma_write():
    p = Picture(220, "The sender's card writes into the receiver's memory at an address that it was told; the immediate number wakes the receiver.")
    p.frame(20, 20, 240, 160, "sender")
    p.frame(460, 20, 240, 160, "receiver")
    p.cell(44, 60, 120, 32, "data", 0)
    for i in range(5):
        p.cell(484 + i * 38, 60, 36, 32, "", 0 if i in (1, 2) else 1, pale=i not in (1, 2))
    p.text(560, 112, "address + 1 KiB, rkey", "m")
    p.arrow((168, 76), (518, 76), kind="line thick l0", words="RDMA WRITE")
    p.box(500, 130, 170, 36, "completion queue", "pale r3")
    p.arrow((260, 148), (496, 148), kind="line dash l3", words="immediate: 4 bytes")
    p.text(360, 208, "The receiver's processor takes no part until the immediate number arrives.", "s")
    return p


def lib_hello():
    p = Picture(250, "Four ranks register with a store, learn every address, and then connect to each other directly.")
    p.box(30, 96, 120, 50, "store", "full r3", "MASTER_ADDR")
    for i in range(4):
        y = 22 + i * 54
        p.box(240, y, 90, 38, f"rank {i}", f"pale r{i}")
        p.arrow((236, y + 19), (154, 112 + i * 6), kind="line dash")
    p.text(190, 238, "1 addresses", "s")
    centre = [(600 + 80 * cos(-pi / 2 + i * pi / 2), 122 + 80 * sin(-pi / 2 + i * pi / 2)) for i in range(4)]
    for i in range(4):
        for j in range(i):
            p.line([centre[i], centre[j]], "line l1")
    for i, (x, y) in enumerate(centre):
        p.dot(x, y, 22, f"full r{i}")
        p.text(x, y + 5, str(i), "b on")
    p.arrow((350, 122), (490, 122), words="then")
    p.text(590, 238, "2 links, made on first use", "s")
    return p


def allreduce_tcp():
    p = Picture(250, "Four ranks in a ring: in three hops each part collects the sums, in three more every rank gets them.")
    for step, (title, done) in enumerate((("before", 0), ("after 3 hops: reduce-scatter", 1), ("after 6 hops: all-gather", 4))):
        x = 20 + step * 240
        p.text(x + 100, 22, title, "b")
        for rank in range(4):
            p.text(x + 2, 58 + rank * 44, f"{rank}", "b", "start")
            for part in range(4):
                full = done == 4 or (done == 1 and part == (rank + 1) % 4)
                label = f"{part}" if done == 0 else "Σ" if full else ""
                p.cell(x + 18 + part * 46, 38 + rank * 44, 44, 30, label, part, pale=not full)
        if step < 2:
            p.arrow((x + 208, 118), (x + 236, 118), kind="line thick")
    p.text(360, 236, "Each rank sends one part to its neighbour per hop: 2(n-1)/n of the buffer in all, for any n.", "s")
    return p


def allreduce_verbs():
    p = Picture(210, "A sender writes messages into slots of the receiver's ring buffer; freed slots return as credits.")
    p.box(20, 60, 120, 60, "sender", "full r0", "3 credits")
    p.box(580, 60, 120, 60, "receiver", "full r1")
    for i in range(8):
        state = 1 if i in (2, 3, 4) else 0
        p.cell(250 + i * 32, 64, 30, 52, "", 0, pale=not state)
    p.text(378, 52, "ring buffer in the receiver's memory", "s")
    p.arrow((144, 78), (246, 78), kind="line thick l0", words="RDMA WRITE")
    p.arrow((510, 90), (576, 90), kind="line l1", words="reduce")
    p.arrow((640, 124), (640, 164), (80, 164), (80, 124), kind="line dash l1")
    p.text(360, 156, "credit: three slots are free again", "s")
    p.text(360, 202, "Without a credit nothing is sent, so no receiver is ever overrun.", "s")
    return p


def allreduce_gpu():
    p = Picture(264, "Two GPUs: each kernel writes data and flags into the other's memory and adds what arrived in its own.")
    for i, x in enumerate((20, 440)):
        p.frame(x, 20, 260, 160, f"GPU {i}")
        p.box(x + (20 if i == 0 else 150), 60, 90, 90, "kernel", f"full r{i}", "adds")
        slots = x + (150 if i == 0 else 20)
        p.cell(slots, 60, 90, 40, f"data of {1 - i}", 1 - i, pale=True)
        p.cell(slots, 108, 90, 40, "flag", 3, pale=True)
    p.arrow((85, 152), (85, 202), (490, 202), (490, 152), kind="line thick l0")
    p.text(360, 196, "NVLink", "s")
    p.arrow((635, 152), (635, 222), (230, 222), (230, 152), kind="line thick l1")
    p.text(360, 252, "A thread that sees the flag may read the data: no host, no copy between.", "s")
    return p


def bindings():
    p = Picture(200, "A torch tensor, a numpy array and a Rust slice name the same bytes.")
    for i in range(12):
        p.cell(150 + i * 35, 84, 33, 34, "", 0, pale=i % 2)
    p.text(360, 140, "one allocation, never copied", "s")
    for x, name, rank in ((60, "torch.Tensor", 3), (285, "numpy.ndarray", 2), (510, "&mut [f32]", 1)):
        p.box(x, 14, 150, 36, name, f"pale r{rank}")
        p.arrow((x + 75, 52), (360 if x == 285 else x + 100 if x < 285 else x + 50, 80), kind=f"line l{rank}")
    p.text(360, 178, "Python's owner keeps the memory alive until the call has ended.", "s")
    return p


def pytorch_ddp():
    p = Picture(220, "DDP fills buckets from the last layer to the first and hands each to the process group when it is full.")
    for i in range(6):
        p.cell(30 + i * 62, 30, 58, 30, f"layer {i}", 0, pale=True)
    p.arrow((396, 80), (34, 80), kind="line l0", words="backward", above=False)
    for i, (name, x) in enumerate((("bucket 1", 30), ("bucket 0", 216))):
        p.cell(x, 116, 182, 32, name, 1 if i else 2)
    p.arrow((402, 132), (500, 132), kind="line thick l1", words="first full")
    p.box(504, 30, 190, 44, "torch.distributed", "pale r3", "")
    p.box(504, 100, 190, 60, "tinynccl", "full r1", "all_reduce")
    p.arrow((599, 76), (599, 98))
    p.text(360, 200, "Bucket 0 is averaged while layers 2 to 0 still compute.", "s")
    return p


def ddp_train():
    p = Picture(220, "A batch is shared between replicas; their gradients are averaged; all take the same step.")
    p.box(16, 86, 90, 50, "batch", "pale r2")
    for i in range(3):
        y = 20 + i * 66
        p.arrow((110, 111), (166, y + 24), kind="line")
        p.box(170, y, 120, 48, f"replica {i}", f"pale r{i}", "own gradients")
        p.arrow((294, y + 24), (376, 111), kind=f"line l{i}")
        p.arrow((500, 111), (576, y + 24), kind="line l1")
        p.box(580, y, 124, 48, "same weights", f"pale r{i}", "same bits")
    p.box(380, 82, 116, 58, "average", "full r1", "all_reduce")
    return p


def ddp_gpu():
    p = Picture(190, "On one stream backward computes layer after layer; on a second stream the buckets are averaged meanwhile.")
    p.text(16, 54, "compute", "s", "start")
    p.text(16, 112, "communication", "s", "start")
    for i in range(4):
        p.cell(120 + i * 112, 34, 108, 32, f"backward {3 - i}", 0)
    p.cell(626, 34, 78, 32, "step", 2)
    for i, (x, w) in enumerate(((236, 96), (348, 96), (460, 96), (572, 48))):
        p.cell(x, 92, w, 32, f"bucket {i}" if w > 60 else "3", 1)
        p.arrow((x - 4, 68), (x + 6, 90), kind="line dash")
    p.line([(568, 136), (568, 144), (622, 144), (622, 136)], "line l3")
    p.text(595, 162, "exposed", "s")
    p.text(320, 182, "Only the last all-reduce delays the step: events order the two streams.", "s")
    return p


def ddp_sine():
    p = Picture(220, "Points of a sine are shared by four ranks; all fit one curve.")
    wave = lambda x: 100 - 70 * sin(2 * pi * x)
    p.line([(60 + 600 * i / 80, wave(i / 80)) for i in range(81)], "line thick")
    for i in range(48):
        x = (i + 0.5) / 48
        p.dot(60 + 600 * x, wave(x) + 9 * sin(37 * i), 4.5, f"full r{i % 4}")
    for rank in range(4):
        p.dot(190 + rank * 96, 202, 5, f"full r{rank}")
        p.text(202 + rank * 96, 207, f"rank {rank}", "s", "start")
    return p


def ddp_gpt():
    p = Picture(220, "Windows of a text go to the ranks; the transformer's gradients are averaged; the loss falls.")
    for i, word in enumerate(("To be, or", "not to be:", "that is the", "question")):
        p.cell(16, 24 + i * 42, 116, 34, word, i)
        p.arrow((136, 41 + i * 42), (206, 41 + i * 42), kind=f"line l{i}")
    p.frame(210, 18, 170, 176)
    for i, layer in enumerate(("attention", "MLP", "attention", "MLP")):
        p.box(226, 30 + i * 40, 138, 32, layer, "pale r2")
    p.arrow((384, 106), (440, 106), kind="line thick l1")
    p.line([(470, 20), (470, 186), (700, 186)])
    p.line([(470 + i * 2.3, 40 + 130 * (1 - 0.965 ** i)) for i in range(96)], "line thick l3")
    p.text(585, 208, "steps", "s")
    p.text(500, 34, "loss", "s", "start")
    return p


CHAPTERS = {
    "01": tcp_echo, "02": verbs_hello, "03": cuda_vec_add, "04": cuda_verbs, "05": rdma_write, "06": lib_hello,
    "07": allreduce_tcp, "08": allreduce_verbs, "09": allreduce_gpu, "11": bindings, "12": pytorch_ddp,
    "13": ddp_train, "14": ddp_gpu, "15": ddp_sine, "16": ddp_gpt,
}

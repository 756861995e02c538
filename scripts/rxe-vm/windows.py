#!/usr/bin/python3
"""Memory windows between two cards, by pyverbs: one process owns the memory, the other asks for it.

  windows.py -d DEVICE -g GID-INDEX [ADDRESS OF THE OWNER]

For a window of each type: what the owner bound can be written, and nothing beside it; after it was taken back (type 1: bound to
nothing; type 2: by a request of the owner, or by the peer's SEND with invalidate) its key is refused. Exit code: 0 if so.
"""

import argparse
import socket
import time

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR, MW, MWBind, MWBindInfo
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
import pyverbs.enums as e

# The port of rdma-core's pingpongs, for which roce-interop.sh waits.
PORT, PART = 18515, 4096
arguments = argparse.ArgumentParser()
arguments.add_argument("-d", dest="device", required=True)
arguments.add_argument("-g", dest="gid", type=int, required=True)
arguments.add_argument("address", nargs="?")
arguments = arguments.parse_args()
owner, gid_index, kernel = arguments.address is None, arguments.gid, arguments.device.startswith("rxe")

context = Context(name=arguments.device)
pd = PD(context)
gid = context.query_gid(1, gid_index).gid


def meet():
    if owner:
        with socket.create_server(("", PORT)) as listener:
            return listener.accept()[0]
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((arguments.address, PORT), timeout=60)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


stream = meet()
told = stream.makefile("r")


def tell(*words):
    stream.sendall(" ".join(map(str, words)).encode() + b"\n")


def hear():
    line = told.readline().split()
    assert line, "the other end is gone"
    return line


class End:
    """A queue pair that is connected to the other end's, with three parts of memory."""

    def __init__(self):
        self.cq = CQ(context, 16)
        self.mr = MR(pd, 3 * PART, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_MW_BIND)
        self.mr.write(("." if owner else "x") * 3 * PART, 3 * PART)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=QPCap(max_recv_wr=4, max_send_wr=4))
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        self.qp = QP(pd, init, attr)
        tell(self.qp.qp_num, gid)
        number, other = hear()
        attr.dest_qp_num, attr.path_mtu, attr.min_rnr_timer, attr.timeout = int(number), e.IBV_MTU_1024, 12, 14
        attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic, attr.max_dest_rd_atomic = 6, 6, 1, 1
        route = GlobalRoute(dgid=GID(other), sgid_index=gid_index)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.qp.to_rts(attr)

    def wait(self):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            count, found = self.cq.poll()
            if count:
                return found[0]
        raise TimeoutError("no completion")

    def send(self, opcode, rkey=None, address=None, invalidates=None):
        sge = [SGE(self.mr.buf, PART, self.mr.lkey)] if address else []
        wr = SendWR(opcode=opcode, num_sge=len(sge), sg=sge or None)
        if address:
            wr.set_wr_rdma(rkey, address)
        if invalidates:
            wr.imm_data = invalidates
        self.qp.post_send(wr)
        return self.wait().status


def case(kind, way):
    """`way` is how the window is taken back, or "beyond": the peer asks for one byte more than is bound."""
    end = End()
    if not owner:
        rkey, address = map(int, hear())
        if way == "beyond":
            assert end.send(e.IBV_WR_RDMA_WRITE, rkey, address + 1) == e.IBV_WC_REM_ACCESS_ERR
        else:
            assert end.send(e.IBV_WR_RDMA_WRITE, rkey, address) == e.IBV_WC_SUCCESS
            if way == "peer":
                assert end.send(e.IBV_WR_SEND_WITH_INV, invalidates=rkey) == e.IBV_WC_SUCCESS
            tell("written")
            hear()
            assert end.send(e.IBV_WR_RDMA_WRITE, rkey, address) == e.IBV_WC_REM_ACCESS_ERR
        tell("refused")
        return hear()
    window = MW(pd, kind)
    part = MWBindInfo(end.mr, end.mr.buf + PART, PART, e.IBV_ACCESS_REMOTE_WRITE)
    if kind == e.IBV_MW_TYPE_1:
        end.qp.bind_mw(window, MWBind(part, e.IBV_SEND_SIGNALED))
        assert end.wait().status == e.IBV_WC_SUCCESS
        rkey = window.rkey
    else:
        wr = SendWR(opcode=e.IBV_WR_BIND_MW)
        wr.set_bind_wr(window, part)
        end.qp.post_send(wr)
        assert end.wait().status == e.IBV_WC_SUCCESS
        rkey = wr.rkey
    if way == "peer":
        end.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(end.mr.buf, PART, end.mr.lkey)]))
    tell(rkey, end.mr.buf + PART)
    untouched = "." * PART
    if way != "beyond":
        hear()
        assert end.mr.read(3 * PART, 0).decode() == untouched + "x" * PART + untouched, "what was written"
        if way == "peer":
            received = end.wait()
            assert received.status == e.IBV_WC_SUCCESS
            # Linux 6.1's rdma_rxe does not say so.
            assert kernel or received.wc_flags & e.IBV_WC_WITH_INV
        elif kind == e.IBV_MW_TYPE_1:
            end.qp.bind_mw(window, MWBind(MWBindInfo(end.mr, end.mr.buf, 0, 0), e.IBV_SEND_SIGNALED))
            assert end.wait().status == e.IBV_WC_SUCCESS
        else:
            assert end.send(e.IBV_WR_LOCAL_INV, invalidates=rkey) == e.IBV_WC_SUCCESS
        end.mr.write(untouched * 3, 3 * PART)
        tell("taken back")
    hear()
    assert end.mr.read(3 * PART, 0).decode() == untouched * 3, "bytes that may not be written"
    window.close()
    tell("next")


if owner:
    ways = [(e.IBV_MW_TYPE_1, "owner"), (e.IBV_MW_TYPE_2, "owner"), (e.IBV_MW_TYPE_2, "peer")]
    # Linux 6.1's rdma_rxe looks at the region's bounds in place of the window's.
    if not kernel:
        ways += [(e.IBV_MW_TYPE_1, "beyond"), (e.IBV_MW_TYPE_2, "beyond")]
    tell(len(ways))
    for kind, way in ways:
        tell(kind, way)
        case(kind, way)
else:
    count = int(hear()[0])
    for _ in range(count):
        kind, way = hear()
        case(int(kind), way)
        print(f"type {kind}, {way}: ok")
    print(f"windows of both types: {count} cases ok")

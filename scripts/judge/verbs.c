/* Calls of libibverbs whose results programs rely on, one line each: `NAME: RESULT`. The same program runs over any
 * device; scripts/judge/rxe.sh compares the card in user space with the kernel's rdma_rxe.
 *   verbs DEVICE GID-INDEX */
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NEED(x) do { if (!(x)) { printf("%s: failed: %s\n", #x, strerror(errno)); exit(2); } } while (0)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static char memory[1 << 16];
static int gid_index;

static void said(const char *name, int code) {
    printf("%s: %s\n", name, code == 0 ? "done" : code == EBUSY ? "EBUSY" : code == EINVAL ? "EINVAL" : strerror(code));
}

static struct ibv_qp *queue_pair(struct ibv_cq *cq, struct ibv_srq *srq) {
    struct ibv_qp_init_attr_ex init = {
        .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC, .pd = pd,
        .cap = {.max_send_wr = 128, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
    };
    return ibv_create_qp_ex(context, &init);
}

/* Connected to itself. */
static void connect_it(struct ibv_qp *qp) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    NEED(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr.qp_state = IBV_QPS_RTR;
    attr.ah_attr.is_global = attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.sgid_index = gid_index;
    attr.ah_attr.grh.hop_limit = 64;
    NEED(!ibv_query_gid(context, 1, gid_index, &attr.ah_attr.grh.dgid));
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = qp->qp_num;
    attr.max_dest_rd_atomic = attr.max_rd_atomic = 1;
    attr.min_rnr_timer = 1;
    NEED(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 12;
    attr.retry_cnt = attr.rnr_retry = 3;
    NEED(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static int readable(int fd, int milliseconds) {
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    return poll(&wait, 1, milliseconds) == 1;
}

/* Completions within a second. */
static int completions(struct ibv_cq *cq, int most) {
    struct ibv_wc wc;
    struct timespec pause = {.tv_nsec = 1000000};
    int n = 0;
    for (int i = 0; i < 1000 && n < most; i++) {
        while (n < most && ibv_poll_cq(cq, 1, &wc) == 1)
            n++;
        nanosleep(&pause, NULL);
    }
    return n;
}

static int post(struct ibv_qp *qp, int num_sge) {
    struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = 8, .lkey = mr->lkey};
    struct ibv_send_wr *bad, wr = {
        .sg_list = &sge, .num_sge = num_sge, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = (uintptr_t)memory + 4096, .rkey = mr->rkey}};
    return ibv_post_send(qp, &wr, &bad);
}

static void in_use(void) {
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_cq *cq = ibv_create_cq(context, 256, NULL, channel, 0);
    struct ibv_srq_init_attr srq_attr = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pd, &srq_attr);
    NEED(channel && cq && srq);
    struct ibv_qp *qp = queue_pair(cq, srq);
    NEED(qp);
    said("deallocate a domain in use", ibv_dealloc_pd(pd));
    said("destroy a completion queue of a queue pair", ibv_destroy_cq(cq));
    said("destroy a shared receive queue of a queue pair", ibv_destroy_srq(srq));
    said("destroy a channel of a completion queue", ibv_destroy_comp_channel(channel));
    said("destroy the queue pair", ibv_destroy_qp(qp));
    said("then the shared receive queue", ibv_destroy_srq(srq));
    said("then the completion queue", ibv_destroy_cq(cq));
    said("then the channel", ibv_destroy_comp_channel(channel));
}

static void batch(void) {
    struct ibv_cq *cq = ibv_create_cq(context, 256, NULL, NULL, 0);
    struct ibv_qp *qp = queue_pair(cq, NULL);
    NEED(cq && qp);
    connect_it(qp);
    struct ibv_qp_ex *x = ibv_qp_to_qp_ex(qp);
    ibv_wr_start(x);
    for (int i = 0; i < 3; i++) {
        struct ibv_sge list[2] = {{(uintptr_t)memory, 8, mr->lkey}, {(uintptr_t)memory, 8, mr->lkey}};
        x->wr_id = i;
        x->wr_flags = IBV_SEND_SIGNALED;
        ibv_wr_rdma_write(x, mr->rkey, (uintptr_t)memory + 4096);
        ibv_wr_set_sge_list(x, i == 1 ? 2 : 1, list);
    }
    printf("a batch with a refused request: %s, ", ibv_wr_complete(x) ? "refused" : "taken");
    printf("%d completions\n", completions(cq, 1));
    said("a request of -1 elements", post(qp, -1));
    NEED(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

static void events(void) {
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_cq *cq = ibv_create_cq(context, 256, NULL, channel, 0);
    struct ibv_qp *qp = queue_pair(cq, NULL);
    NEED(channel && cq && qp);
    connect_it(qp);
    NEED(!ibv_req_notify_cq(cq, 0) && !post(qp, 1));
    printf("an event: %s\n", readable(channel->fd, 5000) ? "comes" : "does not come");
    NEED(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
    printf("when its queue is gone: %s\n", readable(channel->fd, 0) ? "is still there" : "is gone");
    NEED(!ibv_destroy_comp_channel(channel));
}

static void sizes(void) {
    struct ibv_device_attr device;
    NEED(!ibv_query_device(context, &device));
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    NEED(cq);
    said("a completion queue of one more than there can be", ibv_resize_cq(cq, device.max_cqe + 1));
    NEED(!ibv_destroy_cq(cq));
}

int main(int argc, char **argv) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    NEED(argc == 3 && list);
    gid_index = atoi(argv[2]);
    for (int i = 0; list[i]; i++)
        if (!strcmp(ibv_get_device_name(list[i]), argv[1]))
            context = ibv_open_device(list[i]);
    NEED(context);
    NEED(pd = ibv_alloc_pd(context));
    NEED(mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
    in_use();
    batch();
    events();
    sizes();
    NEED(!ibv_dereg_mr(mr));
    said("deallocate the domain", ibv_dealloc_pd(pd));
    said("close the device", ibv_close_device(context));
    return 0;
}

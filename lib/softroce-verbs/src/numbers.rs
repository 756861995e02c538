// The numbers themselves, for the macros of `constants.rs` and those of the test that compares them.

modules! {
    ibv_qp_type {
        IBV_QPT_RC = 2,
        IBV_QPT_UC = 3,
        IBV_QPT_UD = 4,
    }
    ibv_qp_state {
        IBV_QPS_RESET = 0,
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_SQD = 4,
        IBV_QPS_SQE = 5,
        IBV_QPS_ERR = 6,
    }
    ibv_port_state {
        IBV_PORT_NOP = 0,
        IBV_PORT_DOWN = 1,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_PORT_ACTIVE_DEFER = 5,
    }
    ibv_wr_opcode {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
        IBV_WR_LOCAL_INV = 7,
        IBV_WR_BIND_MW = 8,
        IBV_WR_SEND_WITH_INV = 9,
    }
    ibv_wc_opcode {
        IBV_WC_SEND = 0,
        IBV_WC_RDMA_WRITE = 1,
        IBV_WC_RDMA_READ = 2,
        IBV_WC_COMP_SWAP = 3,
        IBV_WC_FETCH_ADD = 4,
        IBV_WC_BIND_MW = 5,
        IBV_WC_LOCAL_INV = 6,
        IBV_WC_RECV = 128,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
    }
    ibv_wc_status {
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_EEC_OP_ERR = 3,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_MW_BIND_ERR = 6,
        IBV_WC_BAD_RESP_ERR = 7,
        IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_WC_LOC_RDD_VIOL_ERR = 14,
        IBV_WC_REM_INV_RD_REQ_ERR = 15,
        IBV_WC_REM_ABORT_ERR = 16,
        IBV_WC_INV_EECN_ERR = 17,
        IBV_WC_INV_EEC_STATE_ERR = 18,
        IBV_WC_FATAL_ERR = 19,
        IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21,
        IBV_WC_TM_ERR = 22,
        IBV_WC_TM_RNDV_INCOMPLETE = 23,
    }
}

numbers! {
    ibv_mtu {
        IBV_MTU_256 = 1,
        IBV_MTU_512 = 2,
        IBV_MTU_1024 = 3,
        IBV_MTU_2048 = 4,
        IBV_MTU_4096 = 5,
    }
    ibv_gid_type {
        IBV_GID_TYPE_IB = 0,
        IBV_GID_TYPE_ROCE_V1 = 1,
        IBV_GID_TYPE_ROCE_V2 = 2,
    }
    ibv_mw_type {
        IBV_MW_TYPE_1 = 1,
        IBV_MW_TYPE_2 = 2,
    }
    ibv_srq_type {
        IBV_SRQT_BASIC = 0,
        IBV_SRQT_XRC = 1,
        IBV_SRQT_TM = 2,
    }
    ibv_srq_init_attr_mask {
        IBV_SRQ_INIT_ATTR_TYPE = 1,
        IBV_SRQ_INIT_ATTR_PD = 2,
        IBV_SRQ_INIT_ATTR_XRCD = 4,
        IBV_SRQ_INIT_ATTR_CQ = 8,
        IBV_SRQ_INIT_ATTR_TM = 16,
    }
    ibv_srq_attr_mask {
        IBV_SRQ_MAX_WR = 1,
        IBV_SRQ_LIMIT = 2,
    }
    ibv_qp_init_attr_mask {
        IBV_QP_INIT_ATTR_PD = 1,
        IBV_QP_INIT_ATTR_XRCD = 2,
        IBV_QP_INIT_ATTR_CREATE_FLAGS = 4,
        IBV_QP_INIT_ATTR_MAX_TSO_HEADER = 8,
        IBV_QP_INIT_ATTR_IND_TABLE = 16,
        IBV_QP_INIT_ATTR_RX_HASH = 32,
        IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 64,
    }
    ibv_qp_create_send_ops_flags {
        IBV_QP_EX_WITH_RDMA_WRITE = 1,
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 2,
        IBV_QP_EX_WITH_SEND = 4,
        IBV_QP_EX_WITH_SEND_WITH_IMM = 8,
        IBV_QP_EX_WITH_RDMA_READ = 16,
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 32,
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 64,
        IBV_QP_EX_WITH_LOCAL_INV = 128,
        IBV_QP_EX_WITH_BIND_MW = 256,
        IBV_QP_EX_WITH_SEND_WITH_INV = 512,
        IBV_QP_EX_WITH_TSO = 1024,
    }
    ibv_create_cq_wc_flags {
        IBV_WC_EX_WITH_BYTE_LEN = 1,
        IBV_WC_EX_WITH_IMM = 2,
        IBV_WC_EX_WITH_QP_NUM = 4,
        IBV_WC_EX_WITH_SRC_QP = 8,
        IBV_WC_EX_WITH_SLID = 16,
        IBV_WC_EX_WITH_SL = 32,
        IBV_WC_EX_WITH_DLID_PATH_BITS = 64,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP = 128,
    }
    ibv_cq_init_attr_mask {
        IBV_CQ_INIT_ATTR_MASK_FLAGS = 1,
        IBV_CQ_INIT_ATTR_MASK_PD = 2,
    }
    ibv_create_cq_attr_flags {
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 1,
        IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 2,
    }
    ibv_values_mask {
        IBV_VALUES_MASK_RAW_CLOCK = 1,
    }
    ibv_rereg_mr_flags {
        IBV_REREG_MR_CHANGE_TRANSLATION = 1,
        IBV_REREG_MR_CHANGE_PD = 2,
        IBV_REREG_MR_CHANGE_ACCESS = 4,
    }
    ibv_link_layer {
        IBV_LINK_LAYER_UNSPECIFIED = 0,
        IBV_LINK_LAYER_INFINIBAND = 1,
        IBV_LINK_LAYER_ETHERNET = 2,
    }
    ibv_atomic_cap {
        IBV_ATOMIC_NONE = 0,
        IBV_ATOMIC_HCA = 1,
        IBV_ATOMIC_GLOB = 2,
    }
    ibv_device_cap_flags {
        IBV_DEVICE_PORT_ACTIVE_EVENT = 0x400,
        IBV_DEVICE_RC_RNR_NAK_GEN = 0x1000,
        IBV_DEVICE_MEM_WINDOW = 0x2_0000,
        IBV_DEVICE_MEM_WINDOW_TYPE_2B = 0x100_0000,
    }
    ibv_event_type {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_SQ_DRAINED = 5,
        IBV_EVENT_PATH_MIG = 6,
        IBV_EVENT_PATH_MIG_ERR = 7,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12,
        IBV_EVENT_SM_CHANGE = 13,
        IBV_EVENT_SRQ_ERR = 14,
        IBV_EVENT_SRQ_LIMIT_REACHED = 15,
        IBV_EVENT_QP_LAST_WQE_REACHED = 16,
        IBV_EVENT_CLIENT_REREGISTER = 17,
        IBV_EVENT_GID_CHANGE = 18,
        IBV_EVENT_WQ_FATAL = 19,
    }
}

bits! {
    ibv_access_flags {
        IBV_ACCESS_LOCAL_WRITE = 0,
        IBV_ACCESS_REMOTE_WRITE = 1,
        IBV_ACCESS_REMOTE_READ = 2,
        IBV_ACCESS_REMOTE_ATOMIC = 3,
        IBV_ACCESS_MW_BIND = 4,
        IBV_ACCESS_ZERO_BASED = 5,
        IBV_ACCESS_ON_DEMAND = 6,
        IBV_ACCESS_HUGETLB = 7,
    }
    ibv_qp_attr_mask {
        IBV_QP_STATE = 0,
        IBV_QP_CUR_STATE = 1,
        IBV_QP_EN_SQD_ASYNC_NOTIFY = 2,
        IBV_QP_ACCESS_FLAGS = 3,
        IBV_QP_PKEY_INDEX = 4,
        IBV_QP_PORT = 5,
        IBV_QP_QKEY = 6,
        IBV_QP_AV = 7,
        IBV_QP_PATH_MTU = 8,
        IBV_QP_TIMEOUT = 9,
        IBV_QP_RETRY_CNT = 10,
        IBV_QP_RNR_RETRY = 11,
        IBV_QP_RQ_PSN = 12,
        IBV_QP_MAX_QP_RD_ATOMIC = 13,
        IBV_QP_ALT_PATH = 14,
        IBV_QP_MIN_RNR_TIMER = 15,
        IBV_QP_SQ_PSN = 16,
        IBV_QP_MAX_DEST_RD_ATOMIC = 17,
        IBV_QP_PATH_MIG_STATE = 18,
        IBV_QP_CAP = 19,
        IBV_QP_DEST_QPN = 20,
    }
    ibv_send_flags {
        IBV_SEND_FENCE = 0,
        IBV_SEND_SIGNALED = 1,
        IBV_SEND_SOLICITED = 2,
        IBV_SEND_INLINE = 3,
    }
    ibv_wc_flags {
        IBV_WC_GRH = 0,
        IBV_WC_WITH_IMM = 1,
        IBV_WC_WITH_INV = 3,
    }
    ibv_port_cap_flags {
        IBV_PORT_CM_SUP = 16,
        IBV_PORT_IP_BASED_GIDS = 26,
    }
}

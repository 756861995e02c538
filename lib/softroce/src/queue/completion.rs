//! Completions, with the numbers of `ibv_wc_status` and `ibv_wc_opcode`.

/// Status with which a work request ended (InfiniBand specification, 11.6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Done.
    Success = 0,
    /// A message longer than its receive, or than the service takes.
    LocalLength = 1,
    /// The queue pair could not execute the request.
    LocalQpOperation = 2,
    /// A key, address or right of the request's own memory does not fit.
    LocalProtection = 4,
    /// Not done: the queue pair had failed before, or was moved to ERR.
    Flushed = 5,
    /// A window could not be bound.
    WindowBind = 6,
    /// The peer's answer fits no request.
    BadResponse = 7,
    /// A peer may not do this to our memory.
    LocalAccess = 8,
    /// The peer does not take this request.
    RemoteInvalidRequest = 9,
    /// The peer's memory does not allow this access.
    RemoteAccess = 10,
    /// The peer failed at its own end.
    RemoteOperation = 11,
    /// No acknowledgement came, however often the packets were sent again.
    RetriesExceeded = 12,
    /// The peer had no receive posted, however often the packets were sent again.
    RnrRetriesExceeded = 13,
    /// The device failed.
    Fatal = 19,
    /// None of these.
    General = 21,
}

/// Operation of the work request that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum WcOpcode {
    /// A SEND.
    Send = 0,
    /// A WRITE.
    Write = 1,
    /// A READ.
    Read = 2,
    /// A compare-and-swap.
    CompareSwap = 3,
    /// A fetch-and-add.
    FetchAdd = 4,
    /// A window was bound.
    BindWindow = 5,
    /// A key of ours was invalidated.
    LocalInv = 6,
    /// A receive, by a SEND.
    Recv = 128,
    /// A receive, by a WRITE with immediate data.
    RecvWriteImm = 129,
}

/// A completion. With a [`Status`] other than success only `id`, `status` and `qpn` are valid, as in verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wc {
    /// `id` of the work request.
    pub id: u64,
    /// Success, or the reason of the failure.
    pub status: Status,
    /// Operation that ended.
    pub opcode: WcOpcode,
    /// Received bytes: of a receive (with the 40 of the GRH for datagrams), a READ or an atomic operation.
    pub byte_len: u32,
    /// Immediate data as it came.
    pub imm: Option<[u8; 4]>,
    /// The key that the peer invalidated.
    pub invalidated: Option<u32>,
    /// Our queue pair.
    pub qpn: u32,
    /// The sender of a datagram.
    pub src_qpn: u32,
    /// True if the receive begins with a GRH.
    pub grh: bool,
    /// True if the datagram came over IPv4, so that the GRH has an IPv4 header at its end (annex A17.4.5.1 asks for
    /// this).
    pub ipv4: bool,
}

impl Wc {
    /// An empty completion, to be overwritten.
    pub const EMPTY: Wc = Wc {
        id: 0,
        status: Status::Success,
        opcode: WcOpcode::Send,
        byte_len: 0,
        imm: None,
        invalidated: None,
        qpn: 0,
        src_qpn: 0,
        grh: false,
        ipv4: false,
    };
}

//! The contract of a link (see `tinynccl::transport`), checked over every backend and wrapper.

#[macro_use]
mod suite;

mod basics;
mod credits;
mod death;
mod faults;
mod handshake;
mod harness;
#[allow(unreachable_pub)]
#[path = "../../../milestones/06-lib-hello/src/link.rs"]
mod link;
mod loops;
mod processes;
mod random;
mod relays;
mod sealed;
mod sleeping;
mod strangers;
mod toy;
mod verbs_faults;
mod zero_copy;

use harness::Backend;

suite! {
    inproc: Backend::InProc;
    shm: Backend::Shm;
    tcp: Backend::Tcp;
    tcp_with_tiny_socket_buffers: Backend::TcpTiny;
    four_tcp_streams: Backend::TcpStreams;
    four_tcp_streams_with_tiny_socket_buffers: Backend::TcpTinyStreams;
    delayed_inproc: Backend::DelayedInProc;
    delayed_tcp: Backend::DelayedTcp;
    split_inproc: Backend::SplitInProc;
    split_tcp: Backend::SplitTcp;
    verbs: Backend::Verbs;
    verbs_with_two_queue_pairs: Backend::TwoQpVerbs;
    split_verbs_with_four_queue_pairs: Backend::SplitVerbs;
    toy_transport: Backend::Toy;
    relayed_tcp: Backend::RelayedTcp;
    relayed_shm: Backend::RelayedShm;
    twice_relayed_tcp: Backend::TwiceRelayedTcp;
    relayed_verbs: Backend::RelayedVerbs;
    rails: Backend::Rails;
    rails_by_rdma: Backend::RdmaRails;
    split_rails: Backend::SplitRails;
    sealed_tcp: Backend::SealedTcp;
    sealed_tcp_with_tiny_socket_buffers: Backend::SealedTcpTiny;
    four_sealed_tcp_streams_with_tiny_socket_buffers: Backend::SealedTcpTinyStreams;
    split_sealed_tcp: Backend::SplitSealedTcp;
    sealed_relayed_tcp: Backend::SealedRelayedTcp;
    sealed_rails: Backend::SealedRails;
}

//! The contract of a link (see `tinynccl::transport`), checked over every backend and wrapper.

mod basics;
mod credits;
mod death;
mod faults;
mod handshake;
mod harness;
mod processes;
mod random;
mod relays;
mod sleeping;
mod strangers;
mod toy;
mod verbs_faults;
mod zero_copy;

use harness::Backend;

macro_rules! suite {
    ($($name:ident: $backend:expr;)*) => {$(
        mod $name {
            use super::*;
            #[test]
            fn messages_arrive_whole_and_in_order_in_every_pairing_of_calls() { if $backend.is_available() { basics::pairings($backend) } }
            #[test]
            fn messages_announced_by_the_one_before_arrive() { if $backend.is_available() { basics::announced($backend) } }
            #[test]
            fn calls_on_an_idle_link_return_at_once() { if $backend.is_available() { basics::idle($backend) } }
            #[test]
            fn misuse_is_an_error_and_harmless() { if $backend.is_available() { basics::misuse($backend) } }
            #[test]
            fn an_unexpected_message_is_reported_and_stays() { if $backend.is_available() { basics::mismatch($backend) } }
            #[test]
            fn credits_are_enough_and_bounded() { if $backend.is_available() { credits::bounded($backend) } }
            #[test]
            fn both_ends_flooding_do_not_deadlock() { if $backend.is_available() { credits::flood($backend) } }
            #[test]
            fn ping_pong_through_sleep_loses_no_wake_up() { if $backend.is_available() { sleeping::ping_pong($backend) } }
            #[test]
            fn a_sender_without_credit_is_woken() { if $backend.is_available() { sleeping::credit($backend) } }
            #[test]
            fn the_death_of_the_peer_comes_after_its_messages() { if $backend.is_available() { death::drained($backend) } }
            #[test]
            fn the_death_of_the_peer_wakes_a_sleeper() { if $backend.is_available() { death::wakes($backend) } }
            #[test]
            fn what_was_flushed_before_closing_arrives() { if $backend.is_available() { death::flushed($backend) } }
            #[test]
            fn dropping_with_data_in_flight_is_clean() { if $backend.is_available() { death::in_flight($backend) } }
            #[test]
            fn any_interleaving_keeps_the_order() { if $backend.is_available() { random::interleavings($backend) } }
        }
    )*};
}

suite! {
    inproc: Backend::InProc;
    shm: Backend::Shm;
    tcp: Backend::Tcp;
    tcp_with_tiny_socket_buffers: Backend::TcpTiny;
    four_tcp_streams: Backend::TcpStreams;
    four_tcp_streams_with_tiny_socket_buffers: Backend::TcpTinyStreams;
    checksums_over_four_tcp_streams: Backend::ChecksumTcpStreams;
    checksums_over_inproc: Backend::ChecksumInProc;
    checksums_over_shm: Backend::ChecksumShm;
    checksums_over_tcp: Backend::ChecksumTcp;
    delayed_inproc: Backend::DelayedInProc;
    delayed_tcp: Backend::DelayedTcp;
    split_inproc: Backend::SplitInProc;
    split_tcp: Backend::SplitTcp;
    verbs: Backend::Verbs;
    verbs_with_two_queue_pairs: Backend::TwoQpVerbs;
    checksums_over_verbs_with_four_queue_pairs: Backend::ChecksumVerbs;
    split_verbs_with_four_queue_pairs: Backend::SplitVerbs;
    toy_transport: Backend::Toy;
    checksums_over_toy_transport: Backend::ChecksumToy;
    relayed_tcp: Backend::RelayedTcp;
    relayed_shm: Backend::RelayedShm;
    twice_relayed_tcp: Backend::TwiceRelayedTcp;
    checksums_over_relayed_tcp: Backend::ChecksumRelayedTcp;
    relayed_verbs: Backend::RelayedVerbs;
}

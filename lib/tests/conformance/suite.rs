//! The tests of the contract, a module of them for each kind of link.

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

//! Completion statuses and asynchronous events in words, with the likely cause.
//!
//! Names and numbers: `ibv_wc_status` and `ibv_event_type` in rdma-core's `libibverbs/verbs.h`. Causes: the InfiniBand
//! architecture specification, volume 1, chapter 9.9 ("Error detection and handling"), and what was seen.

use log::Level;

use super::Timing;

/// Work that was not done because the queue pair had failed before: never the first cause.
pub(crate) const FLUSHED: u32 = 5;
/// No acknowledgement came.
pub(crate) const RETRIES_EXCEEDED: u32 = 12;

/// A completion with an error, in words.
pub(crate) fn completion(status: u32, vendor: u32, timing: &Timing) -> String {
    let (name, cause) = match status {
        1 => ("local length error", "a message was longer than its receive or than the port takes"),
        2 => (
            "local queue pair operation error",
            "the device could not carry a request out: its port is down or has no route to the peer any more, or a bug",
        ),
        4 => (
            "local protection error",
            "memory that was posted is not registered under the key that was given: it was deregistered too early",
        ),
        FLUSHED => ("flushed", "the queue pair had failed before; the first error is the cause"),
        7 => (
            "bad response",
            "the peer answered with a packet that fits no request: packets of another queue pair, or a broken device",
        ),
        8 => ("local access error", "the peer wrote to memory of ours that it may not write to"),
        9 => (
            "remote invalid request",
            "the peer's device does not allow this operation on its queue pair, or had no room for it (some devices, rxe of Linux 6.1 among them, also when receives ran out)",
        ),
        10 => (
            "remote access error",
            "the peer's device refused the address or the key: its memory is not registered (any more), or the two ranks run different builds",
        ),
        11 => {
            ("remote operation error", "the peer's device failed while it carried the request out; see its own errors")
        }
        RETRIES_EXCEEDED => {
            let wait = 4.096e-6 * f64::from(1u32 << timing.timeout.min(31));
            return format!(
                "completion status 12, transport retry counter exceeded (vendor code {vendor:#x}): the peer's device did not \
                 answer {} repetitions, {:.1} ms apart: its process or host is gone, or no packet gets through (route, MTU, \
                 firewall for UDP port 4791, packet loss)",
                timing.retries,
                wait * 1e3
            );
        }
        13 => (
            "receiver not ready, retries exceeded",
            "the peer had no receive posted: it does not poll, or the two ranks run different builds",
        ),
        19 => ("fatal error", "the device failed"),
        20 => ("response timeout", "the peer's device does not answer"),
        21 => ("general error", "the device gives no cause"),
        _ => ("a status that this version does not know", "see ibv_wc_status in verbs.h"),
    };
    format!("completion status {status}, {name} (vendor code {vendor:#x}): {cause}")
}

/// An asynchronous event in words, and how bad it is: an error means that the device can no longer be used. What
/// befalls a single queue pair is for its own completions to report.
pub(crate) fn event(code: u32, port: Option<i32>) -> (String, Level) {
    let (name, level) = match code {
        0 => ("a completion queue failed (overrun, or a protection error)", Level::Warn),
        1 => ("a queue pair failed without a completion to tell", Level::Warn),
        2 => ("a queue pair got a request that breaks the protocol", Level::Warn),
        3 => ("a queue pair got a request for memory that it may not touch", Level::Warn),
        4 => ("a queue pair got its first packet", Level::Debug),
        5 => ("a send queue is drained", Level::Debug),
        6 => ("a path migrated", Level::Info),
        7 => ("a path could not migrate", Level::Warn),
        8 => ("the device failed or was removed", Level::Error),
        9 => ("the port became active", Level::Info),
        10 => ("the port is down", Level::Warn),
        11 => ("the port's LID changed", Level::Warn),
        12 => ("the port's P_Key table changed", Level::Info),
        13 => ("the subnet manager changed", Level::Info),
        14 => ("a shared receive queue failed", Level::Warn),
        15 => ("a shared receive queue is low", Level::Info),
        16 => ("a queue pair has used its last receive", Level::Debug),
        17 => ("the subnet manager asks to register again", Level::Info),
        18 => ("the port's GID table changed: an address was added or removed", Level::Info),
        19 => ("a work queue failed", Level::Warn),
        _ => ("an event that this version does not know", Level::Info),
    };
    let port = port.map(|p| format!(", port {p}")).unwrap_or_default();
    (format!("asynchronous event {code}{port}: {name}"), level)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMING: Timing = Timing { timeout: 14, retries: 6, rnr_retries: 6 };

    #[test]
    fn every_status_has_a_name_and_a_cause() {
        for status in 1..=23 {
            let text = completion(status, 0x81, &TIMING);
            assert!(text.contains(&format!("status {status},")) && text.contains("0x81"), "{text}");
        }
        let text = completion(12, 0, &TIMING);
        assert!(text.contains("6 repetitions, 67.1 ms apart"), "{text}");
        assert!(completion(10, 0, &TIMING).contains("remote access error"));
        assert!(completion(99, 0, &TIMING).contains("does not know"));
    }

    #[test]
    fn events_name_the_port_and_whether_the_device_is_lost() {
        assert_eq!(event(10, Some(1)), ("asynchronous event 10, port 1: the port is down".to_owned(), Level::Warn));
        assert_eq!(event(8, None).1, Level::Error);
        assert!(event(77, None).0.contains("does not know"));
    }
}

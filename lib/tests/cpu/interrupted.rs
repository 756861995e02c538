//! Waits that end because the caller asks for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tinynccl::{Comm, Config, Error, interrupt};

#[test]
fn a_wait_ends_when_asked_on_all_ranks() {
    static STOP: AtomicBool = AtomicBool::new(false);
    for count in [1, 1 << 20] {
        STOP.store(false, Ordering::Release);
        let config = Config::default().with(|c| c.timeout = Duration::from_secs(60));
        let mut comms = Comm::threads(2, config).unwrap();
        let (other, waiting) = (comms.pop().unwrap(), comms.pop().unwrap());
        let thread = std::thread::spawn(move || {
            let mut data = vec![0f32; count];
            waiting.barrier().unwrap();
            let outcome =
                interrupt::watched(|| STOP.load(Ordering::Acquire), || waiting.broadcast_in_place(&mut data, 1));
            assert!(!interrupt::asked_to_stop(), "the check ends with the call");
            outcome
        });
        other.barrier().unwrap();
        STOP.store(true, Ordering::Release);
        let error = thread.join().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Aborted { op, .. } if op.starts_with("broadcast")), "{error}");
        let error = other.barrier().unwrap_err();
        assert!(error.to_string().contains("rank 0: interrupted"), "{error}");
    }
}

//! A process that ends with its queue pairs still there.

use std::net::{TcpListener, TcpStream};
use std::process::Command;

use softroce::{SendOp, Service, Status};

use crate::end::{End, exchange, loopback};

const PORT: &str = "SOFTROCE_TEST_EXIT_PORT";
/// Messages in each direction but the last one: enough that acknowledgements wait for answers.
const ROUNDS: u64 = 3;
/// Processes: each one is the first to end before the wait of its acknowledgement does, or not.
const PROCESSES: usize = 8;

/// Answers each message but the last one, then ends with an acknowledgement that waits for an answer.
#[test]
fn a_process_that_ends() {
    let Ok(port) = std::env::var(PORT) else { return };
    let mut stream = TcpStream::connect(("127.0.0.1", port.parse().expect("a port"))).expect("connected");
    let end = End::new(&loopback(), Service::Rc);
    let theirs = exchange(&mut stream, &end.card());
    end.connect(&theirs);
    (0..=ROUNDS).for_each(|id| end.recv(id, 4096, 8));
    // SAFETY: the child calls nothing but exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: calls the functions that were registered for it: ours must neither wait nor send here.
        unsafe { libc::exit(0) };
    }
    let mut status = 1;
    // SAFETY: a child of ours, and a variable for its status.
    assert_eq!((unsafe { libc::waitpid(child, &raw mut status, 0) }, status), (child, 0));
    exchange(&mut stream, &end.card());
    for _ in 0..ROUNDS {
        // Completions of sends come between.
        while end.wait().id > ROUNDS {}
        end.send(100, SendOp::Send, 0, 8);
    }
    while end.wait().id > ROUNDS {}
    // As returning from `main` does, without the time that the test harness takes before it.
    std::process::exit(0);
}

#[test]
fn the_last_message_is_acknowledged() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = listener.local_addr().expect("an address").port();
    for _ in 0..PROCESSES {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "exit::a_process_that_ends"])
            .env(PORT, port.to_string())
            .spawn()
            .expect("started");
        let (mut stream, _) = listener.accept().expect("connected");
        let end = End::new(&loopback(), Service::Rc);
        let theirs = exchange(&mut stream, &end.card());
        // Two repetitions after 67 ms each, and no process to answer them.
        end.connect_with(&theirs, |attr| attr.retry_cnt = 2);
        (0..ROUNDS).for_each(|id| end.recv(id, 4096, 8));
        exchange(&mut stream, &end.card());
        for _ in 0..ROUNDS {
            end.send(100, SendOp::Send, 0, 8);
            // Its acknowledgement, and the answer.
            let both = [end.wait(), end.wait()];
            assert!(both.iter().all(|wc| wc.status == Status::Success), "{both:?}");
        }
        end.send(101, SendOp::Send, 0, 8);
        assert_eq!(end.wait().status, Status::Success);
        assert!(child.wait().expect("waited").success());
    }
}

//! Real processes: `/bin/sh`, and this test program itself.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use super::*;
use tinynccl_transport::bootstrap::{Event, Session, rendezvous_from_env};

/// Output of a launcher.
#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<u8>>>);

impl Captured {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.text().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

/// Runs a script in every rank: exit code, standard output, standard error.
fn shell(ranks: usize, script: &str, change: impl FnOnce(Launcher) -> Launcher) -> (i32, Captured, Captured) {
    let (out, err) = (Captured::default(), Captured::default());
    let mut launcher = Launcher::new(ranks).program("/bin/sh").args(["-c", script]).grace(Duration::from_millis(50));
    launcher.stdout = out.0.clone();
    launcher.stderr = err.0.clone();
    (change(launcher).run().unwrap(), out, err)
}

#[test]
fn every_rank_gets_its_environment_and_a_prefix() {
    let script = r#"echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE $EXTRA"; echo "err" >&2; printf "$TINYNCCL_UNIQUE_ID" | cut -c1-11"#;
    let (code, out, err) = shell(3, script, |l| l.env("EXTRA", "more"));
    assert_eq!(code, 0);
    let expected: Vec<String> = (0..3)
        .flat_map(|r| [format!("[rank {r}] {r} of 3, {r} of 3 more"), format!("[rank {r}] tinynccl-4-")])
        .collect();
    assert_eq!(out.lines(), expected);
    assert_eq!(err.lines(), ["[rank 0] err", "[rank 1] err", "[rank 2] err"]);
}

#[test]
fn the_first_failure_gives_the_exit_code_and_is_named() {
    let (code, _, err) = shell(3, "[ $RANK = 1 ] && exit 3; exec sleep 1000", |l| l);
    assert_eq!(code, 3);
    assert_eq!(err.text(), "[launcher] rank 1 exited with code 3; the other ranks are being ended\n");
}

#[test]
fn an_elastic_job_goes_on_without_ranks_and_ends_well_if_one_does() {
    let script = "[ $RANK = 1 ] && kill -9 $$; sleep 0.2; [ $RANK != 0 ] || exit 4; echo on";
    let (code, out, err) = shell(3, script, |l| l.elastic(true));
    assert_eq!((code, out.text().as_str()), (0, "[rank 2] on\n"));
    assert!(err.text().contains("[launcher] rank 1 was killed by signal 9 (SIGKILL); 2 go on\n"), "{}", err.text());
    assert!(err.text().contains("[launcher] rank 0 exited with code 4; "), "{}", err.text());
    let (code, _, err) = shell(2, "exit $((RANK + 5))", |l| l.elastic(true));
    assert!(matches!(code, 5 | 6), "{code}: {}", err.text());
}

#[test]
fn a_killed_rank_is_named_with_its_signal() {
    let (code, _, err) = shell(3, "[ $RANK = 2 ] && kill -9 $$; exec sleep 1000", |l| l);
    assert_eq!(code, 128 + 9);
    assert!(err.text().contains("rank 2 was killed by signal 9 (SIGKILL)"), "{}", err.text());
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed() {
    // Rank 0 fails only once rank 1 ignores the signal.
    let ready = std::env::temp_dir().join(format!("tinynccl-test-{}", std::process::id()));
    let script = r#"[ $RANK = 0 ] && { until [ -e "$READY" ]; do sleep 0.01; done; exit 7; }
        trap '' TERM; : >"$READY"; exec sleep 1000"#;
    let (code, _, err) = shell(2, script, |l| l.kill_grace(Duration::from_millis(50)).env("READY", &ready));
    std::fs::remove_file(ready).unwrap();
    assert_eq!(code, 7);
    assert!(err.text().contains("rank 1 did not end after SIGTERM: killed"), "{}", err.text());
}

#[test]
fn survivors_have_time_to_speak() {
    // Rank 1 takes as long as it likes within the grace; it is not cut off.
    let script = "[ $RANK = 0 ] && exit 5; sleep 0.2; echo 'lost rank 0'; exit 1";
    let (code, out, err) = shell(2, script, |l| l.grace(Duration::from_secs(60)));
    assert_eq!((code, out.text().as_str()), (5, "[rank 1] lost rank 0\n"));
    assert!(err.text().contains("rank 0 exited with code 5"), "{}", err.text());
}

#[test]
fn a_plain_rank_0_is_not_relayed() {
    let (code, out, _) = shell(2, "[ $RANK = 0 ] || echo hello", |l| l.plain_rank0(true));
    assert_eq!(
        (code, out.text().as_str()),
        (
            0,
            "[rank 1] hello
"
        )
    );
}

#[test]
fn a_process_left_behind_does_not_hold_the_launcher() {
    let (code, out, _) = shell(1, "sleep 5 & echo done", |l| l);
    assert_eq!((code, out.text().as_str()), (0, "[rank 0] done\n"));
}

#[test]
fn what_cannot_be_started_is_named() {
    let e = Launcher::new(2).program("/no/such/program").run().unwrap_err().to_string();
    assert!(e.contains("rank 0") && e.contains("/no/such/program") && e.contains("No such file"), "{e}");
    for ranks in [0, 1_000_000] {
        let e = Launcher::new(ranks).program("/bin/true").run().unwrap_err().to_string();
        assert!(e.contains("expected 1 to 4096"), "{e}");
    }
    let e = Launcher::new(1).run().unwrap_err().to_string();
    assert!(e.contains("no program"), "{e}");
}

/// Variable with the task of [`helper`], when the tests below run it in a separate process.
const HELPER: &str = "TINYNCCL_TEST_HELPER";

/// Not a test: the other side of those below.
#[test]
fn helper() {
    let Ok(what) = std::env::var(HELPER) else { return };
    let code = match what.as_str() {
        "script" => {
            let script = std::env::var("SCRIPT").unwrap();
            Launcher::new(2).program("/bin/sh").args(["-c", &script]).run().unwrap()
        }
        "blocked" => {
            let signals = signals::Signals::watch().unwrap();
            let mut child = Command::new("true").spawn().unwrap();
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(signals.fd(), rustix::event::PollFlags::IN)];
            let deadline = tinynccl_sys::threads::deadline_after(LONG);
            let left = || tinynccl_sys::threads::left(deadline);
            let mut ready = 0;
            // The signal itself ends a wait, too.
            while ready == 0 && !left().is_zero() {
                ready = tinynccl_sys::threads::poll(&mut fds, left()).unwrap();
            }
            assert!(child.wait().unwrap().success());
            i32::from(ready == 0)
        }
        _ if !is_rank() => Launcher::new(3).run_self().unwrap(),
        "exchange" => {
            let (place, session) = join();
            let mut values = session.exchange("sum", &[0, 1, 2], vec![place.rank as u8 + 1], LONG).unwrap();
            values.sort();
            // In one write, so that the test harness's own output does not come between.
            println!("\n{} of {}: {values:?}", place.local_rank, place.launcher);
            0
        }
        "lost" => {
            let (place, session) = join();
            let (send, receive) = std::sync::mpsc::channel();
            session.on_event(Box::new(move |e| drop(send.send(e.clone()))));
            if place.rank == 1 {
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
            }
            while let Ok(event) = receive.recv_timeout(LONG) {
                if let Event::RankLost { rank, .. } = event {
                    println!("\nlost rank {rank}");
                    break;
                }
            }
            1
        }
        "early" => {
            if std::env::var("RANK").unwrap() == "1" {
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
            }
            let config = Config::default().with(|c| c.connect_timeout = Duration::from_secs(3600));
            let place = rendezvous_from_env(&config).unwrap();
            let null = serde_json::Value::Null;
            println!("\n{}", Session::join(&place.id, place.rank, place.world_size, null, &config).unwrap_err());
            1
        }
        other => panic!("{other}"),
    };
    std::process::exit(code);
}

const LONG: Duration = Duration::from_secs(60);

fn join() -> (tinynccl_transport::bootstrap::Rendezvous, Session) {
    let config = Config::default();
    let place = rendezvous_from_env(&config).unwrap();
    let session = Session::join(&place.id, place.rank, place.world_size, serde_json::Value::Null, &config).unwrap();
    (place, session)
}

fn helper_process(what: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["launch::tests::helper", "--exact", "--nocapture", "--test-threads=1"])
        .env(HELPER, what)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(what: &str) -> (Option<i32>, String, String) {
    let out = helper_process(what).output().unwrap();
    (
        out.status.code(),
        String::from_utf8_lossy(&out.stdout).into_owned(),
        String::from_utf8_lossy(&out.stderr).into_owned(),
    )
}

#[test]
fn the_end_of_a_rank_is_heard_of_where_its_signal_is_blocked_or_ignored() {
    for how in ["--block-signal=CHLD", "--ignore-signal=CHLD"] {
        let helper = helper_process("blocked");
        let mut command = Command::new("env");
        command.arg(how).arg(helper.get_program()).args(helper.get_args()).env(HELPER, "blocked");
        let out = command.output().unwrap();
        assert!(out.status.success(), "{how}: {out:?}");
    }
}

#[test]
fn a_program_that_runs_itself_forms_a_job() {
    let (code, out, err) = output("exchange");
    assert_eq!(code, Some(0), "{out}{err}");
    for rank in 0..3 {
        assert!(out.contains(&format!("[rank {rank}] {rank} of tinynccl: [[1], [2], [3]]")), "{out}");
    }
}

#[test]
#[ignore = "needs Open MPI's mpirun"]
fn ranks_of_mpirun_meet_without_an_address() {
    let exe = std::env::current_exe().unwrap();
    // Directly, and behind a shell that stands between mpirun and the rank.
    for shell in [false, true] {
        let mut command = Command::new("mpirun");
        command.args(["--oversubscribe", "-n", "3"]).env(HELPER, "exchange");
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        if shell {
            command.args(["/bin/sh", "-c", r#""$0" "$@"; exit $?"#]);
        }
        let out = command.arg(&exe).args(["launch::tests::helper", "--exact", "--nocapture"]).output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        for rank in 0..3 {
            assert!(text.contains(&format!("{rank} of Open MPI: [[1], [2], [3]]")), "shell {shell}: {text}");
        }
    }
}

#[test]
fn the_ranks_hear_of_a_killed_one_and_the_launcher_names_it() {
    let (code, out, err) = output("lost");
    assert_eq!(code, Some(128 + 9), "{out}{err}");
    for rank in [0, 2] {
        assert!(out.contains(&format!("[rank {rank}] lost rank 1")), "{out}{err}");
    }
    assert!(err.contains("[launcher] rank 1 was killed by signal 9 (SIGKILL)"), "{err}");
}

#[test]
fn a_rank_killed_before_it_has_joined_is_named_by_the_others() {
    let (code, out, err) = output("early");
    assert_eq!(code, Some(128 + 9), "{out}{err}");
    for rank in [0, 2] {
        let line = out.lines().find(|line| line.starts_with(&format!("[rank {rank}] rendezvous at ")));
        let named = "rank 1 was killed by signal 9 (SIGKILL) before it had joined";
        assert!(line.is_some_and(|line| line.contains(named)), "{out}{err}");
    }
}

#[test]
fn a_program_finds_itself_without_proc() {
    let missing = || Err(std::io::Error::from_raw_os_error(libc::ENOENT));
    assert_eq!(super::spawn::own_path(missing()).unwrap(), std::env::current_exe().unwrap());
    // The whole launcher, where the system lets us hide /proc.
    let hide = ["--user", "--map-root-user", "--mount", "sh", "-c"];
    let inside = |script: &str, command: &Command| {
        let mut hidden = Command::new("unshare");
        hidden.args(hide).arg(format!("mount -t tmpfs none /proc && {script}")).arg(command.get_program());
        hidden.args(command.get_args()).envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        hidden.output()
    };
    let command = helper_process("exchange");
    if !inside("true", &command).is_ok_and(|tried| tried.status.success()) {
        return eprintln!("SKIPPED: a launcher without /proc: no mount namespace for us here");
    }
    let out = inside(r#"exec "$0" "$@""#, &command).unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    for rank in 0..3 {
        assert!(text.contains(&format!("[rank {rank}] {rank} of tinynccl: [[1], [2], [3]]")), "{text}");
    }
}

/// A launcher in its own process, with both ranks ready.
fn running(script: &str) -> (Child, BufReader<std::process::ChildStdout>, Vec<u32>) {
    let mut command = helper_process("script");
    command.env("SCRIPT", script);
    // Under nohup, or as a background job, these are ignored from the start, and a launcher leaves that as it is.
    let listen = || {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // SAFETY: the default disposition needs no handler; signal(2) is async-signal-safe.
            if unsafe { libc::signal(signal, libc::SIG_DFL) } == libc::SIG_ERR {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec, `listen` makes system calls only.
    unsafe { command.pre_exec(listen) };
    let mut launcher = command.spawn().unwrap();
    let mut out = BufReader::new(launcher.stdout.take().unwrap());
    let mut pids = Vec::new();
    while pids.len() < 2 {
        let mut line = String::new();
        assert!(out.read_line(&mut line).unwrap() > 0, "the launcher ended early");
        pids.extend(line.trim_end().split_once("ready ").map(|(_, pid)| pid.parse::<u32>().unwrap()));
    }
    (launcher, out, pids)
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).unwrap();
}

#[test]
fn signals_are_passed_on() {
    for (name, number) in [
        ("INT", rustix::process::Signal::INT),
        ("TERM", rustix::process::Signal::TERM),
        ("HUP", rustix::process::Signal::HUP),
    ] {
        let script = format!("trap 'echo got {name}; exit 40' {name}; echo ready $$; while :; do sleep 0.05; done");
        let (mut launcher, mut out, _) = running(&script);
        signal(&launcher, number);
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert_eq!(launcher.wait().unwrap().code(), Some(40), "{rest}");
        for rank in 0..2 {
            assert!(rest.contains(&format!("[rank {rank}] got {name}")), "{rest}");
        }
    }
}

#[test]
fn an_interrupted_job_says_so_once() {
    let (mut launcher, mut out, _) = running("echo ready $$; exec sleep 1000");
    signal(&launcher, rustix::process::Signal::INT);
    out.read_to_string(&mut String::new()).unwrap();
    let mut said = String::new();
    launcher.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(130), "{said}");
    let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("[launcher]")).collect();
    assert_eq!(lines, ["[launcher] interrupted (SIGINT)"], "{said}");
}

#[test]
fn a_second_signal_ends_ranks_that_do_not_listen() {
    let (mut launcher, mut out, _) = running("trap '' INT; echo ready $$; exec sleep 1000");
    signal(&launcher, rustix::process::Signal::INT);
    signal(&launcher, rustix::process::Signal::HUP);
    out.read_to_string(&mut String::new()).unwrap();
    // SIGHUP itself, or the SIGTERM that follows, whichever came first.
    let code = launcher.wait().unwrap().code();
    assert!(matches!(code, Some(129 | 143)), "{code:?}");
}

#[test]
fn ranks_die_with_their_launcher() {
    let (mut launcher, mut out, pids) = running("echo ready $$; exec sleep 1000");
    signal(&launcher, rustix::process::Signal::KILL);
    launcher.wait().unwrap();
    // The pipe ends when the launcher's relays are gone; the ranks are then dead or dying.
    out.read_to_string(&mut String::new()).unwrap();
    let deadline = tinynccl_sys::threads::deadline_after(LONG);
    let alive = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, state)| !matches!(state.trim_start().chars().next(), Some('Z' | 'X')))
    };
    while pids.iter().any(alive) {
        assert!(!tinynccl_sys::threads::left(deadline).is_zero(), "ranks {pids:?} outlive their launcher");
        std::thread::yield_now();
    }
}

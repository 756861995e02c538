//! Milestone 06: the smallest program that uses the library. Ranks find each other, introduce themselves, and try each
//! kind of call once.

use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use lib_hello::{link, meeting};
use replay::Replay;
use tinynccl::config::TransportChoice;
use tinynccl::launch::{self, Launcher};
use tinynccl::{Comm, Config, ReduceOp};

/// Ranks find each other and communicate.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Ranks to start on this machine (default 2). Leave it out under torchrun, mpirun or srun.
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=256))]
    ranks: Option<usize>,
    /// The transport: auto, tcp, shm or verbs (default: TINYNCCL_TRANSPORT, else auto).
    #[arg(long)]
    transport: Option<TransportChoice>,
    /// Run over the link of src/link.rs, with ranks as threads of this process.
    #[arg(long, conflicts_with = "transport")]
    own_link: bool,
    #[command(flatten)]
    replay: Replay,
}

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    program_kit::exit_code(args.replay.around(launch::is_rank(), || start(&args)), |_| false)
}

/// Started by a launcher, acts as its rank. Started by hand, runs this program again, once per rank.
fn start(args: &Args) -> Result<i32> {
    let mut config = Config::from_env()?;
    if let Some(transport) = args.transport {
        config.transport = transport;
    }
    if args.own_link {
        meeting::run(args.ranks.unwrap_or(2), config, hello)?;
        return Ok(0);
    }
    if launch::is_rank() {
        let comm = Comm::from_env_with(config).context("joining the other ranks")?;
        let size = comm.size();
        ensure!(
            args.ranks.is_none_or(|r| r == size),
            "--ranks {} but the launcher started {size}: leave --ranks out",
            args.ranks.unwrap_or_default()
        );
        hello(&comm)?;
        comm.close()?;
        return Ok(0);
    }
    Ok(Launcher::new(args.ranks.unwrap_or(2)).run_self()?)
}

fn hello(comm: &Comm) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let me = format!("rank {rank} of {size}");
    let system = rustix::system::uname();
    println!(
        "{me}: hello from process {} on {}, local rank {}",
        std::process::id(),
        system.nodename().to_string_lossy(),
        comm.local_rank()
    );

    let sum = add_up(comm)?;
    let expected = (size * (size + 1) / 2) as u64;
    ensure!(sum == expected, "{me}: all_reduce gave {sum}, expected {expected}");
    println!("{me}: all_reduce of my {} gave {sum} = n(n+1)/2", rank + 1);

    let word = spread(comm, *b"tinynccl")?;
    ensure!(&word == b"tinynccl", "{me}: broadcast gave {:?}", String::from_utf8_lossy(&word));
    println!("{me}: broadcast brought {:?} from rank 0", String::from_utf8_lossy(&word));

    let heard = greet(comm)?;
    ensure!(heard == greeting((rank + size - 1) % size), "{me}: heard {:?}", String::from_utf8_lossy(&heard));
    println!("{me}: the ring brought {:?}", String::from_utf8_lossy(&heard).trim_end());

    println!("{me}: {}", links(comm));

    // No rank leaves before every rank has reached this point.
    comm.barrier()?;
    if rank == 0 {
        println!("OK: world of size {size}");
    }
    Ok(())
}

/// Every rank contributes rank + 1 and gets the sum.
// EXERCISE 1 (How it works): contribute rank + 1 to an all_reduce with the operator Sum, and return the result.
fn add_up(comm: &Comm) -> tinynccl::Result<u64> {
    let mut sum = [0u64];
    comm.all_reduce(&[comm.rank() as u64 + 1], &mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
}

/// Rank 0's `word`, on every rank.
// EXERCISE 2 (How it works): broadcast rank 0's word; the other ranks provide memory for it.
fn spread(comm: &Comm, word: [u8; 8]) -> tinynccl::Result<[u8; 8]> {
    let mut word = if comm.rank() == 0 { word } else { *b"--------" };
    comm.broadcast_in_place(&mut word, 0)?;
    Ok(word)
}

/// Sends a greeting to the next rank and returns the one from the previous rank. Every rank sends first, so a group
/// posts both calls together, and they cannot wait for each other.
// EXERCISE 3 (How it works): send `greeting` of our rank to the next rank and receive the previous rank's, both
// posted in one `group`; the last rank's next is rank 0.
fn greet(comm: &Comm) -> tinynccl::Result<[u8; GREETING]> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let (greeting, mut heard) = (greeting(rank), [0u8; GREETING]);
    comm.group(|group| {
        group.send(&greeting, next)?;
        group.recv(&mut heard, previous)
    })?;
    Ok(heard)
}

/// Length of a greeting, which both sides of a message must know.
const GREETING: usize = 24;

fn greeting(rank: usize) -> [u8; GREETING] {
    let mut bytes = [b' '; GREETING];
    for (to, from) in bytes.iter_mut().zip(format!("hello from rank {rank}").bytes()) {
        *to = from;
    }
    bytes
}

/// The transports of our links, and the reason.
fn links(comm: &Comm) -> String {
    let kinds: Vec<String> =
        comm.census().links.into_iter().map(|(kind, count)| format!("{count} over {kind}")).collect();
    let asked = comm.config().transport;
    let why = match asked {
        _ if kinds.iter().any(|kind| kind.ends_with(link::KIND)) => "--own-link",
        TransportChoice::Auto => "auto: shared memory where ranks share a host, TCP elsewhere",
        TransportChoice::Tcp => "tcp was asked for",
        TransportChoice::Shm => "shm was asked for",
        TransportChoice::Verbs => "verbs was asked for",
    };
    match kinds.as_slice() {
        [] => "no links: alone in the world".to_owned(),
        _ => format!("links: {} ({why})", kinds.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Results of `call` on three ranks, which are threads, by rank.
    fn on_three<T: Send>(call: impl Fn(&Comm) -> tinynccl::Result<T> + Sync) -> Vec<T> {
        let mut config = Config::default();
        (config.timeout, config.connect_timeout) = (Duration::from_secs(10), Duration::from_secs(10));
        let comms = Comm::threads(3, config).unwrap();
        let call = &call;
        std::thread::scope(|scope| {
            // A rank that panics takes its communicator with it, so the others fail instead of waiting.
            let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || call(&comm).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn add_up_gives_every_rank_the_sum() {
        assert_eq!(on_three(add_up), [6; 3]);
    }

    #[test]
    fn spread_gives_every_rank_the_word_of_rank_0() {
        let word = |comm: &Comm| spread(comm, [b'0' + comm.rank() as u8; 8]);
        assert_eq!(on_three(word), [*b"00000000"; 3]);
    }

    #[test]
    fn greet_hears_the_rank_before() {
        assert_eq!(on_three(greet), [greeting(2), greeting(0), greeting(1)]);
    }

    #[test]
    fn greetings_fit_and_differ() {
        assert_eq!(&greeting(255)[..19], b"hello from rank 255");
        assert_ne!(greeting(1), greeting(11));
    }

    #[test]
    fn bad_flags_are_refused() {
        for bad in [&["x", "--ranks", "0"][..], &["x", "--ranks", "257"], &["x", "--transport", "pigeon"], &["x", "y"]]
        {
            assert!(Args::try_parse_from(bad).is_err(), "{bad:?}");
        }
        let args = Args::try_parse_from(["x", "--transport", "shm"]).unwrap();
        assert_eq!((args.ranks, args.transport), (None, Some(TransportChoice::Shm)));
    }
}

//! A job over links of one's own: its ranks are threads. Two ranks rendezvous over the link that the library has made
//! between them: the lower one sends the port on which it listens, and the higher one connects to it.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Error, Result, anyhow, ensure};
use tinynccl::transport::{LinkOptions, LinkPair};
use tinynccl::wire::Header;
use tinynccl::{Comm, Config};

use crate::link;

/// Time limit of the rendezvous of two ranks.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `work` on every rank. All links between them are those of [`link`].
///
/// # Errors
/// A link that could not be made, or the error of a rank.
pub fn run(ranks: usize, mut config: Config, work: impl Fn(&Comm) -> Result<()> + Sync) -> Result<()> {
    // Over links, and not through the memory that threads share.
    (config.one_shot, config.stage) = (0, 0);
    let depth = config.fifo_depth;
    let failures = Arc::new(Mutex::new(Vec::<Error>::new()));
    let failed = failures.clone();
    let comms = Comm::threads_with_links(ranks, config, move |rank, peer, mut theirs| {
        let made = meet(&mut theirs, depth).with_context(|| format!("a link between rank {rank} and rank {peer}"));
        made.unwrap_or_else(|error| {
            failed.lock().unwrap_or_else(PoisonError::into_inner).push(error);
            theirs
        })
    })?;
    let work = &work;
    let ended: Vec<Result<()>> = thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            // A rank that fails takes its communicator with it, so the others fail instead of waiting.
            .map(|comm| scope.spawn(move || work(&comm).and_then(|()| Ok(comm.close()?))))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked")))).collect()
    });
    // Links first: a job that ran over others has shown nothing.
    let failure = failures.lock().unwrap_or_else(PoisonError::into_inner).pop();
    failure.map_or(Ok(()), Err)?;
    ended.into_iter().collect()
}

/// Our own link in place of `theirs`.
fn meet(theirs: &mut LinkPair, depth: usize) -> Result<LinkPair> {
    let mut peer = theirs.send.peer().clone();
    let begin = Instant::now();
    let wait = || {
        ensure!(begin.elapsed() < PATIENCE, "the other rank did not come within {} s", PATIENCE.as_secs());
        thread::yield_now();
        Ok(())
    };
    let header = Header { len: size_of::<u16>() as u32, ..Header::default() };
    let max_message = loop {
        match theirs.send.reserve()? {
            Some(memory) => break memory.len(),
            None => wait()?,
        }
    };
    let socket = if peer.rank < peer.peer {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        if let Some(memory) = theirs.send.reserve()? {
            memory[..2].copy_from_slice(&port.to_ne_bytes());
        }
        theirs.send.commit(&header)?;
        listener.set_nonblocking(true)?;
        loop {
            match listener.accept() {
                Ok((socket, _)) => break socket,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => wait()?,
                Err(e) => return Err(e.into()),
            }
        }
    } else {
        let port = loop {
            match theirs.recv.peek()? {
                Some((_, port)) => break u16::from_ne_bytes([port[0], port[1]]),
                None => wait()?,
            }
        };
        theirs.recv.release()?;
        TcpStream::connect((Ipv4Addr::LOCALHOST, port))?
    };
    peer.address = socket.peer_addr()?.to_string();
    Ok(link::pair(socket, peer, &LinkOptions { max_message, depth })?)
}

#[cfg(test)]
mod tests {
    use tinynccl::ReduceOp;
    use tinynccl::wire::Algorithm;

    use super::*;

    #[test]
    fn the_librarys_collectives_run_over_links_of_our_own() {
        for (ranks, algorithm) in [(2, None), (3, Some(Algorithm::Ring)), (4, Some(Algorithm::Tree))] {
            let mut config = Config::default();
            config.algorithm = algorithm;
            run(ranks, config, |comm| {
                for count in [1, 1000, 300_000] {
                    let mut data = vec![comm.rank() as f32 + 1.0; count];
                    comm.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
                    let sum = (ranks * (ranks + 1) / 2) as f32;
                    ensure!(data.iter().all(|&x| x == sum), "{ranks} ranks, {count} elements");
                }
                let links = comm.census().links;
                ensure!(links.iter().all(|(kind, _)| *kind == link::KIND) && !links.is_empty(), "{links:?}");
                Ok(())
            })
            .unwrap();
        }
    }
}

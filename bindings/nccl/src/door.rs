//! Where ranks ask for a rendezvous that they know only by name.
//!
//! A store has a port that nobody knows beforehand. Two kinds of ranks must find one without its unique id: survivors
//! that shrink a communicator, whose store may have died with another rank, and those of `NCCL_COMM_ID`, which know one
//! address for all communicators. So a process has a *door*, a listener that tells where the store of a given name is.
//! It tells addresses alone: the secret of the rendezvous comes from what the ranks know already.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tinynccl::bootstrap::interface;
use tinynccl::{Config, Error};

use crate::fault::{Fault, Result};
use crate::place;

/// The name of a rendezvous: a digest that only its ranks can compute.
pub(crate) type Name = [u8; 32];

const MAGIC: [u8; 8] = *b"tinydoor";
/// One visitor takes this long at most.
const VISIT: Duration = Duration::from_millis(500);
/// Pause before asking again.
const PAUSE: Duration = Duration::from_millis(20);
/// Addresses of a store at most.
const MOST: usize = 16;

struct Doors {
    /// This process's own door.
    own: Option<Vec<SocketAddr>>,
    /// Doors at addresses that the environment names.
    others: Vec<SocketAddr>,
    /// Where the stores are.
    stores: Option<HashMap<Name, Vec<SocketAddr>>>,
}

static DOORS: Mutex<Doors> = Mutex::new(Doors { own: None, others: Vec::new(), stores: None });

fn doors() -> std::sync::MutexGuard<'static, Doors> {
    DOORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The addresses of this process's door, which is opened if there is none yet.
pub(crate) fn addresses(config: &Config) -> Result<Vec<SocketAddr>> {
    let mut doors = doors();
    if let Some(addresses) = &doors.own {
        return Ok(addresses.clone());
    }
    let port = listen(place::anywhere(config)?)?.port();
    let all = interface::with_loopback(config)?;
    let addresses: Vec<SocketAddr> = all.iter().map(|a| SocketAddr::new(a.ip, port)).take(MOST).collect();
    doors.own = Some(addresses.clone());
    Ok(addresses)
}

/// Opens a door at `address`, if there is none yet.
pub(crate) fn open_at(address: SocketAddr) -> Result<()> {
    let mut doors = doors();
    if !doors.others.contains(&address) {
        listen(address)?;
        doors.others.push(address);
    }
    Ok(())
}

/// Tells visitors from now on that the store of `name` is there.
pub(crate) fn post(name: Name, store: Vec<SocketAddr>) {
    doors().stores.get_or_insert_default().insert(name, store);
}

fn listen(at: SocketAddr) -> Result<SocketAddr> {
    let failed = |e: &std::io::Error| Fault::from(Error::io("rendezvous", format!("listening at {at}"), e));
    let listener = TcpListener::bind(at).map_err(|e| failed(&e))?;
    let address = listener.local_addr().map_err(|e| failed(&e))?;
    std::thread::Builder::new()
        .name("tinynccl-door".to_owned())
        .spawn(move || {
            for visitor in listener.incoming() {
                match visitor.and_then(|visitor| serve(&visitor)) {
                    Ok(()) => {}
                    Err(e) => {
                        log::debug!("door at {address}: {e}");
                        // Of descriptors there may be none for a while.
                        std::thread::sleep(PAUSE);
                    }
                }
            }
        })
        .map_err(|e| failed(&e))?;
    Ok(address)
}

fn serve(mut visitor: &TcpStream) -> std::io::Result<()> {
    visitor.set_read_timeout(Some(VISIT))?;
    visitor.set_write_timeout(Some(VISIT))?;
    let mut asked = [0; MAGIC.len() + size_of::<Name>()];
    visitor.read_exact(&mut asked)?;
    let Some(name) = asked.strip_prefix(&MAGIC).and_then(|name| Name::try_from(name).ok()) else { return Ok(()) };
    let store = doors().stores.as_ref().and_then(|stores| stores.get(&name).cloned()).unwrap_or_default();
    let mut answer = vec![store.len().min(MOST) as u8];
    answer.extend(store.iter().take(MOST).flat_map(|address| place::encode(*address)));
    visitor.write_all(&answer)
}

/// Asks the door at one of `addresses` for the store of `name` until it knows one.
///
/// # Errors
/// `ncclSystemError` when it is not told within `config.connect_timeout`; `ncclInvalidUsage` when `stop` says so.
pub(crate) fn ask(
    addresses: &[SocketAddr],
    name: Name,
    config: &Config,
    stop: &dyn Fn() -> bool,
) -> Result<Vec<SocketAddr>> {
    let local = interface::with_loopback(config)?;
    let candidates = interface::order_candidates(&local, addresses, true);
    let begin = Instant::now();
    loop {
        let mut last = "it has no address".to_owned();
        for (address, _) in &candidates {
            match visit(*address, &name) {
                Ok(store) if !store.is_empty() => return Ok(store),
                // The right one, and too early.
                Ok(_) => {
                    last = format!("{address} knows of none yet");
                    break;
                }
                Err(e) => last = format!("{address}: {e}"),
            }
        }
        if stop() {
            return Err(Fault::usage("stopped: the communicator was aborted while it was being made"));
        }
        if begin.elapsed() >= config.connect_timeout {
            let list: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
            let detail = format!(
                "no store for {:.1?} ({last}): has the first rank of the new communicator made the same call, and is its \
                 process alive?",
                begin.elapsed()
            );
            return Err(Error::bootstrap(list.join(", "), detail).into());
        }
        std::thread::sleep(PAUSE);
    }
}

fn visit(address: SocketAddr, name: &Name) -> std::io::Result<Vec<SocketAddr>> {
    let mut door = TcpStream::connect_timeout(&address, VISIT)?;
    door.set_read_timeout(Some(2 * VISIT))?;
    door.set_write_timeout(Some(VISIT))?;
    door.write_all(&[&MAGIC[..], name].concat())?;
    let mut count = [0];
    door.read_exact(&mut count)?;
    let mut bytes = vec![0; usize::from(count[0]).min(MOST) * place::BYTES];
    door.read_exact(&mut bytes)?;
    place::decode(&bytes).ok_or_else(|| std::io::Error::other("what came is not a list of addresses"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;

    #[test]
    fn a_door_tells_what_was_posted_and_nothing_else() {
        let mut config = Config::default();
        config.connect_timeout = Duration::from_millis(100);
        let here = addresses(&config).unwrap();
        assert_eq!(addresses(&config).unwrap(), here, "one door per process");
        let store: SocketAddr = "10.1.2.3:4".parse().unwrap();
        post([1; 32], vec![store]);
        assert_eq!(ask(&here, [1; 32], &config, &|| false).unwrap(), [store]);
        let fault = ask(&here, [2; 32], &config, &|| false).unwrap_err();
        assert!(fault.status == Status::SystemError && fault.text.contains("knows of none yet"), "{fault:?}");
        assert!(ask(&here, [2; 32], &config, &|| true).unwrap_err().text.contains("stopped"));
    }

    #[test]
    fn who_comes_first_waits_for_the_post() {
        let config = Config::default();
        let here = addresses(&config).unwrap();
        let store: SocketAddr = "10.1.2.3:5".parse().unwrap();
        let asked = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                ask(&here, [3; 32], &config, &|| {
                    asked.store(true, std::sync::atomic::Ordering::Release);
                    false
                })
            });
            while !asked.load(std::sync::atomic::Ordering::Acquire) {
                std::thread::yield_now();
            }
            post([3; 32], vec![store]);
            assert_eq!(first.join().unwrap().unwrap(), [store]);
        });
    }
}

//! Two hosts with two networks each; only one of them joins the hosts.
//!
//! The hosts are network namespaces: this process is in the first, rank 1 in the second. Each has `lan0`, which is a
//! cable between them, and `usb0`, as servers have it for their management controller: up, with an address, and leading
//! nowhere.

use std::io::{BufRead as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::thread::UnshareFlags;
use tinynccl::bootstrap::interface::local_addresses;
use tinynccl::{Comm, Config, Error, ReduceOp, launch};

use crate::ranks::{Announced, CannotRunHere, unshare};

/// `lan0` of host 0 and of host 1.
const LAN: [&str; 2] = ["10.77.0.1/24", "10.77.0.2/24"];
/// `usb0` of each host: the same subnet on both, and not the same network.
const USB: [&str; 2] = ["169.254.3.1/24", "169.254.3.2/24"];
const STORE: (&str, &str) = ("10.77.0.1", "29517");

pub(crate) fn run(fixed: bool) -> Result<u8> {
    if launch::is_rank() {
        // Host 1: wait until the cable is plugged in.
        std::io::stdin().lock().read_line(&mut String::new())?;
        network(1)?;
        return rank(Config::from_env()?);
    }
    let interface = std::env::var("TINYNCCL_IFNAME").unwrap_or_else(|_| if fixed { "lan0" } else { "usb0" }.to_owned());
    namespaces()?;
    ip(&["link", "add", "lan0", "type", "veth", "peer", "name", "lan1"])?;
    let variables = |rank: &str| {
        [
            ("RANK", rank.to_owned()),
            ("WORLD_SIZE", "2".to_owned()),
            ("LOCAL_RANK", "0".to_owned()),
            ("MASTER_ADDR", STORE.0.to_owned()),
            // Not without a secret: any client that reaches that address could join.
            ("TINYNCCL_SECRET", "what nobody else knows".to_owned()),
            ("MASTER_PORT", STORE.1.to_owned()),
            ("TINYNCCL_IFNAME", interface.clone()),
            // Measuring at the start would connect the ranks, on machines whose figures are not kept from earlier jobs.
            ("TINYNCCL_TUNE", "off".to_owned()),
            ("TINYNCCL_CONNECT_TIMEOUT", std::env::var("TINYNCCL_CONNECT_TIMEOUT").unwrap_or_else(|_| "5".to_owned())),
        ]
    };
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).envs(variables("1")).stdin(Stdio::piped());
    // SAFETY: one system call that touches no memory of ours.
    unsafe { command.pre_exec(|| rustix::thread::unshare_unsafe(UnshareFlags::NEWNET).map_err(Into::into)) };
    let mut other = command.spawn().context("starting rank 1 on host 1")?;
    ip(&["link", "set", "lan1", "netns", &other.id().to_string(), "name", "lan0"])?;
    other.stdin.take().context("rank 1's input")?.write_all(b"plugged\n")?;
    network(0)?;
    let settings = variables("0");
    // SAFETY: this process has one thread yet.
    settings.iter().for_each(|(name, value)| unsafe { std::env::set_var(name, value) });
    let ours = rank(Config::from_env()?);
    let theirs = other.wait()?.code();
    match (ours, theirs) {
        (Ok(0), Some(0)) => Ok(0),
        (Err(error), Some(3)) if error.is::<Announced>() => Err(error),
        (Ok(_), theirs) => bail!("rank 0 is done, rank 1 ended with exit code {theirs:?}"),
        (Err(error), _) => Err(error),
    }
}

fn rank(config: Config) -> Result<u8> {
    match train(config) {
        Ok(()) => Ok(0),
        Err(error) => match error.downcast_ref::<Error>() {
            Some(
                Error::Timeout { .. }
                | Error::PeerLost { .. }
                | Error::Os { .. }
                | Error::Aborted { .. }
                | Error::Bootstrap { .. },
            ) => Err(Announced(format!("{error:#}")).into()),
            _ => Err(error),
        },
    }
}

fn train(config: Config) -> Result<()> {
    let comm = Comm::from_env_with(config)?;
    println!("rank {}: the ranks have found each other", comm.rank());
    let mut sum = [1.0f32];
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
    ensure!(sum[0] == 2.0, "rank {}: the sum is {}", comm.rank(), sum[0]);
    println!("rank {}: all_reduce works", comm.rank());
    comm.close()?;
    Ok(())
}

/// Takes this process to a separate network namespace.
fn namespaces() -> Result<()> {
    if Command::new("ip").arg("-V").stdout(Stdio::null()).status().is_err() {
        return Err(CannotRunHere("there is no `ip`: install iproute2".to_owned()).into());
    }
    Ok(unshare(UnshareFlags::NEWNET, "a network of our own")?)
}

/// Gives host `host`, which we are on, its interfaces' addresses.
fn network(host: usize) -> Result<()> {
    ip(&["link", "set", "lo", "up"])?;
    ip(&["link", "add", "usb0", "type", "veth", "peer", "name", "bmc"])?;
    for (name, address) in [("lan0", LAN[host]), ("usb0", USB[host])] {
        ip(&["addr", "add", address, "dev", name])?;
        ip(&["link", "set", name, "up"])?;
    }
    ip(&["link", "set", "bmc", "up"])?;
    // A cable works when both ends are up, and the kernel shows it a moment later.
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let up = local_addresses(&Config::default())?;
        if ["lan0", "usb0"].iter().all(|name| up.iter().any(|address| address.interface == *name)) {
            return Ok(());
        }
        ensure!(Instant::now() < end, "the interfaces of host {host} do not come up");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output().context("running ip")?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(CannotRunHere(format!("ip {}: {}", arguments.join(" "), error.trim())).into());
    }
    Ok(())
}

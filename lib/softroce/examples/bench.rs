//! Two processes over the loopback interface: GB/s of WRITEs of 1 MiB, and the half of a ping-pong of 8 bytes, beside
//! the same ping-pong over UDP.
//!
//! ```sh
//! cargo run --release -p softroce --example bench
//! ```

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use softroce::{
    Access, AttrMask as M, Capacity, Cq, Device, Gid, Mr, Qp, QpAttr, QpInit, Remote, SendFlags, SendOp, SendRequest,
    Service, Sge, State, Status,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const PORT: &str = "SOFTROCE_BENCH_PORT";
const MESSAGE: usize = 1 << 20;
const DEPTH: u64 = 8;
const ROUNDS: u64 = 20_000;

struct End {
    qp: Arc<Qp>,
    mr: Mr,
    cq: Arc<Cq>,
    peer: Remote,
    memory: *mut u64,
}

impl End {
    fn connect(stream: &mut TcpStream) -> Result<End> {
        let devices = Device::list()?;
        let context = devices.iter().find(|d| d.is_loopback()).ok_or("no loopback interface")?.open()?;
        let pd = context.alloc_pd();
        let cq = context.create_cq(1024, 0, None)?;
        let memory = Box::leak(vec![0u64; 2 * MESSAGE / 8].into_boxed_slice()).as_mut_ptr();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        // SAFETY: leaked above.
        let mr = unsafe { pd.reg_mr(memory.cast(), 2 * MESSAGE, memory as u64, access) }?;
        let qp = pd.create_qp(&QpInit {
            service: Service::Rc,
            capacity: Capacity { sends: 64, recvs: 1, send_sges: 1, recv_sges: 1, inline: 64 },
            signal_all: false,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
        })?;
        let index = context.device().default_gid_index();
        let gid = *context.device().gids().get(usize::from(index)).ok_or("no GID")?;
        let mut raw = [0; 32];
        raw[..4].copy_from_slice(&qp.number().to_be_bytes());
        raw[4..20].copy_from_slice(&gid.0);
        raw[20..28].copy_from_slice(&(memory as u64).to_be_bytes());
        raw[28..].copy_from_slice(&mr.rkey().to_be_bytes());
        stream.write_all(&raw)?;
        stream.read_exact(&mut raw)?;
        let word = |at: usize| raw[at..at + 4].iter().fold(0u32, |n, b| n << 8 | u32::from(*b));
        let peer_gid = Gid(raw[4..20].try_into()?);
        let peer = Remote { addr: u64::from_be_bytes(raw[20..28].try_into()?), rkey: word(28) };
        let mut attr = QpAttr {
            port: 1,
            access: Access::REMOTE_WRITE,
            path: Some(context.path(peer_gid, index)?),
            path_mtu: context.port().active_mtu,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            dest_qpn: word(0),
            ..QpAttr::default()
        };
        let init = M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS;
        let rtr = M::STATE | M::PATH | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        let rts = M::STATE | M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_RD_ATOMIC;
        for (state, mask) in [(State::Init, init), (State::Rtr, rtr), (State::Rts, rts)] {
            attr.state = state;
            qp.modify(&attr, mask)?;
        }
        let end = End { qp, mr, cq, peer, memory };
        end.meet(stream)?;
        Ok(end)
    }

    /// Waits until both processes are here.
    fn meet(&self, stream: &mut TcpStream) -> Result<()> {
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        Ok(())
    }

    fn write(&self, from: usize, to: u64, len: u32, inline: bool) -> Result<()> {
        let sges = [Sge { addr: (self.mr.addr() + from) as u64, len, lkey: self.mr.lkey() }];
        let op = SendOp::Write(Remote { addr: self.peer.addr + to, ..self.peer });
        let flags = SendFlags { signaled: true, inline, ..SendFlags::default() };
        // SAFETY: the memory is never freed, and what it holds does not matter.
        unsafe { self.qp.post_send(&[SendRequest { id: 0, op, sges: &sges, flags, to: None }]) }.map_err(|(_, e)| e)?;
        Ok(())
    }

    fn completed(&self) -> Result<bool> {
        match self.cq.poll_one() {
            Some(wc) if wc.status == Status::Success => Ok(true),
            Some(wc) => Err(format!("{:?}", wc.status).into()),
            None => Ok(false),
        }
    }

    /// Writes a count to the peer and waits for its count, alternately. `first` begins.
    fn ping_pong(&self, first: bool) -> Result<Duration> {
        let start = Instant::now();
        for round in 1..=ROUNDS {
            // SAFETY: both words lie in the leaked memory; the RDMA device writes to the second one meanwhile.
            let (ours, theirs) = unsafe { (self.memory, self.memory.add(8)) };
            let wait = || -> Result<()> {
                // SAFETY: as above.
                while unsafe { theirs.read_volatile() } != round {
                    std::hint::spin_loop();
                }
                Ok(())
            };
            if !first {
                wait()?;
            }
            // SAFETY: as above.
            unsafe { ours.write_volatile(round) };
            self.write(0, 64, 8, true)?;
            if first {
                wait()?;
            }
            while !self.completed()? {
                std::hint::spin_loop();
            }
        }
        Ok(start.elapsed() / (2 * ROUNDS as u32))
    }
}

fn udp_ping_pong(stream: &mut TcpStream, first: bool) -> Result<Duration> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    stream.write_all(&socket.local_addr()?.port().to_be_bytes())?;
    let mut port = [0; 2];
    stream.read_exact(&mut port)?;
    socket.connect(("127.0.0.1", u16::from_be_bytes(port)))?;
    stream.write_all(&[1])?;
    stream.read_exact(&mut [0])?;
    let mut word = [0; 8];
    let start = Instant::now();
    for _ in 0..ROUNDS {
        if first {
            socket.send(&word)?;
            socket.recv(&mut word)?;
        } else {
            socket.recv(&mut word)?;
            socket.send(&word)?;
        }
    }
    Ok(start.elapsed() / (2 * ROUNDS as u32))
}

fn other_process(port: u16) -> Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    let end = End::connect(&mut stream)?;
    for _ in 0..3 {
        end.meet(&mut stream)?;
    }
    end.ping_pong(false)?;
    udp_ping_pong(&mut stream, false)?;
    Ok(())
}

fn main() -> Result<()> {
    if let Ok(port) = std::env::var(PORT) {
        return other_process(port.parse()?);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut child =
        Command::new(std::env::current_exe()?).env(PORT, listener.local_addr()?.port().to_string()).spawn()?;
    let (mut stream, _) = listener.accept()?;
    let end = End::connect(&mut stream)?;
    for _ in 0..3 {
        let (mut posted, mut done) = (0, 0);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) || done < posted {
            if posted - done < DEPTH && start.elapsed() < Duration::from_secs(1) {
                end.write(0, MESSAGE as u64, MESSAGE as u32, false)?;
                posted += 1;
            }
            if end.completed()? {
                done += 1;
            } else {
                std::thread::yield_now();
            }
        }
        let rate = (done * MESSAGE as u64) as f64 / start.elapsed().as_secs_f64() / 1e9;
        println!("write 1 MiB, {DEPTH} under way: {rate:.2} GB/s");
        end.meet(&mut stream)?;
    }
    let rdma = end.ping_pong(true)?;
    let udp = udp_ping_pong(&mut stream, true)?;
    println!(
        "write 8 B ping-pong, half: {:.2} us; UDP: {:.2} us; ratio {:.2}",
        rdma.as_secs_f64() * 1e6,
        udp.as_secs_f64() * 1e6,
        rdma.as_secs_f64() / udp.as_secs_f64()
    );
    child.wait()?;
    Ok(())
}

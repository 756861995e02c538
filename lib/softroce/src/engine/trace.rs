//! `TINYROCE_TRACE`: all packets of an RDMA device in a file that Wireshark reads.
//!
//! Format: pcap with nanoseconds, link type "raw IP" (draft-ietf-opsawg-pcap). The headers of IP and UDP are those that
//! the kernel makes, their checksums left 0.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::sync::lock;
use crate::wire::icrc::{Route, ip_header};

const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
const RAW_IP: u32 = 101;

#[derive(Debug)]
pub(super) struct Trace {
    file: Mutex<BufWriter<File>>,
}

impl Trace {
    /// Begins a file; `%p` in its name stands for the process.
    pub(super) fn create(name: &str) -> Result<Trace> {
        let name = name.replace("%p", &std::process::id().to_string());
        let fail = |e: std::io::Error| Error::system(format_args!("TINYROCE_TRACE={name}"), &e);
        let mut file = BufWriter::new(File::create(&name).map_err(fail)?);
        let mut header = Vec::new();
        header.extend(MAGIC_NANOSECONDS.to_le_bytes());
        header.extend(2u16.to_le_bytes());
        header.extend(4u16.to_le_bytes());
        header.extend([0; 8]);
        header.extend(65_535u32.to_le_bytes());
        header.extend(RAW_IP.to_le_bytes());
        file.write_all(&header).map_err(fail)?;
        Ok(Trace { file: Mutex::new(file) })
    }

    /// Adds a packet: the UDP payload in parts, and the IPv4 identification that it has.
    pub(super) fn packet<'a>(&self, route: &Route, id: u16, parts: impl Iterator<Item = &'a [u8]> + Clone) {
        let payload: usize = parts.clone().map(<[u8]>::len).sum();
        let udp_len = (payload + 8) as u16;
        let ip = ip_header(route, udp_len, id);
        let len = (ip.len() + 8 + payload) as u32;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        let mut record = Vec::with_capacity(16 + len as usize);
        record.extend((now.tv_sec as u32).to_le_bytes());
        record.extend((now.tv_nsec as u32).to_le_bytes());
        record.extend(len.to_le_bytes());
        record.extend(len.to_le_bytes());
        record.extend(&ip);
        record.extend(route.src.port().to_be_bytes());
        record.extend(route.dst.port().to_be_bytes());
        record.extend(udp_len.to_be_bytes());
        record.extend([0; 2]);
        for part in parts {
            record.extend_from_slice(part);
        }
        // A full disk ends the trace, not the RDMA device.
        let _ = lock(&self.file).write_all(&record);
    }

    /// Writes out what is buffered: a process that is killed leaves all but its last moments.
    pub(super) fn flush(&self) {
        let _ = lock(&self.file).flush();
    }
}

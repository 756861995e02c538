//! Host memory in place of a GPU's. The CPU makes the copies that a GPU's copy engines would make, synchronously, so
//! they do not overlap with the wire. If the system can export host pages as a dmabuf, the buffer is one, so that stage
//! 1 of the probe is real.

use std::any::Any;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, ensure};

use super::Buffer;
use super::pages::Pages;
use crate::exporter;
use crate::pinned::Pinned;
use crate::probe::{Export, Memory};
use crate::why::{Why, errno};

/// A buffer in host memory.
#[derive(Debug)]
pub struct HostBuffer {
    pages: Arc<Pages>,
    len: usize,
    why: Option<Why>,
    /// The dmabuf that holds the pages and its exporter, or the reason why there is none.
    dmabuf: Result<(OwnedFd, String), Why>,
}

impl HostBuffer {
    /// `len` zeroed bytes. `why` is the reason for not using GPU memory, if that was wanted.
    pub fn new(len: usize, why: Option<Why>) -> Result<HostBuffer> {
        ensure!(len > 0, "a buffer of 0 bytes");
        let (pages, dmabuf) = match exporter::make(len) {
            Ok(made) => (made.pages, Ok((made.fd, made.source))),
            Err(why) => {
                let pages = Pages::anonymous(len).map_err(|e| anyhow!("no memory for {len} bytes: {}", errno(&e)))?;
                (pages, Err(why))
            }
        };
        Ok(HostBuffer { pages: Arc::new(pages), len, why, dmabuf })
    }

    fn at(&self, range: Range<usize>) -> Result<*mut u8> {
        ensure!(range.start <= range.end && range.end <= self.len, "bytes {range:?} of a buffer of {}", self.len);
        // SAFETY: within the mapping, which has at least `len` bytes.
        Ok(unsafe { self.pages.start().as_ptr().add(range.start) })
    }
}

impl Memory for HostBuffer {
    fn len(&self) -> usize {
        self.len
    }

    fn address(&self) -> u64 {
        self.pages.start().as_ptr().addr() as u64
    }

    fn export(&self) -> Result<Export, Why> {
        let (fd, source) = self.dmabuf.as_ref().map_err(Why::clone)?;
        let fd = fd.try_clone().map_err(|e| Why::new(format!("dup: {}", errno(&e)), "close some files"))?;
        Ok(Export { fd, offset: 0, source: source.clone() })
    }

    fn device_pointer(&self) -> Result<u64, Why> {
        Err(Why::new(
            "the buffer is host memory: ibv_reg_mr would register it as any other, and prove nothing about a GPU's",
            "run it where there is a GPU",
        ))
    }

    fn pinned(&self, len: usize) -> Result<Pinned> {
        let pages = Pages::anonymous(len).map_err(|e| anyhow!("{len} bytes: {}", errno(&e)))?;
        let start = pages.start();
        // SAFETY: the mapping has `len` zeroed bytes and lives as long as its owner.
        Ok(unsafe { Pinned::new(start, len, "ordinary host memory", Box::new(pages)) })
    }

    fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        self.pages.clone()
    }
}

impl Buffer for HostBuffer {
    fn describe(&self) -> String {
        let dmabuf = match &self.dmabuf {
            Ok((_, source)) => format!(" (a dmabuf of {source})"),
            Err(_) => String::new(),
        };
        let stands =
            if self.why.is_some() { "; it stands for a GPU's memory" } else { ", as asked for (--buffer host)" };
        format!("{} bytes of HOST memory{dmabuf}{stands}", self.len)
    }

    fn instead_of_gpu(&self) -> Option<&Why> {
        self.why.as_ref()
    }

    fn start_out(&self, range: Range<usize>, staging: &Pinned, at: usize, _: usize) -> Result<()> {
        let (from, to) = (self.at(range.clone())?, staging.at(at..at + range.len())?);
        // SAFETY: each range is inside its own memory; the transfer ensures that no one else writes there.
        unsafe { ptr::copy_nonoverlapping(from, to, range.len()) };
        Ok(())
    }

    fn start_in(&self, range: Range<usize>, staging: &Pinned, at: usize, _: usize) -> Result<()> {
        let (to, from) = (self.at(range.clone())?, staging.at(at..at + range.len())?);
        // SAFETY: as in `start_out`.
        unsafe { ptr::copy_nonoverlapping(from, to, range.len()) };
        Ok(())
    }

    fn finish(&self, _: usize, _: Instant) -> Result<()> {
        Ok(())
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = self.at(offset..offset.checked_add(bytes.len()).context("range")?)?;
        // SAFETY: inside the mapping; no copy is in flight (callers use `write` only before and after a transfer).
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.at(offset..offset.checked_add(bytes.len()).context("range")?)?;
        // SAFETY: as in `write`.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_go_where_they_should_and_not_beyond() {
        let buffer = HostBuffer::new(10_000, None).expect("memory");
        let staging = buffer.pinned(4096).expect("memory");
        buffer.write(9_000, &[7; 1000]).expect("fits");
        buffer.start_out(8_999..10_000, &staging, 10, 0).expect("fits");
        buffer.start_in(0..4, &staging, 9, 1).expect("fits");
        let mut got = [9; 5];
        buffer.read(0, &mut got).expect("fits");
        assert_eq!(got, [0, 0, 7, 7, 0]);
        assert!(buffer.write(9_001, &[0; 1000]).is_err() && buffer.write(usize::MAX, &[0]).is_err());
        assert!(buffer.start_out(0..4096, &staging, 1, 0).is_err());
        assert!(buffer.start_in(9_999..10_001, &staging, 0, 0).is_err());
    }

    #[test]
    fn it_says_what_it_is() {
        let buffer = HostBuffer::new(4096, Some(Why::new("no driver", "install it"))).expect("memory");
        assert!(buffer.describe().starts_with("4096 bytes of HOST memory") && buffer.describe().contains("stands for"));
        assert_eq!(buffer.instead_of_gpu().expect("a reason").reason, "no driver");
        assert!(buffer.device_pointer().expect_err("none").reason.contains("host memory"));
        assert!(HostBuffer::new(0, None).is_err());
    }
}

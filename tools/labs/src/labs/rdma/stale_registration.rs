//! A registration belongs to pages; a table of registrations by address forgets that.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use verbs_kit::unavailable::Unavailable;
use verbs_kit::verbs::ffi::ibv_access_flags as Access;
use verbs_kit::verbs::{Mr, Pd};

use super::{Pair, pair};
use crate::ranks::Announced;

const PAGE: usize = 4096;

/// Registrations by address, as a library keeps them to save the system call.
#[derive(Default)]
struct Cache(HashMap<usize, Arc<Mr>>);

impl Cache {
    fn register(&mut self, pd: &Arc<Pd>, at: NonNull<u8>) -> Result<Arc<Mr>> {
        let address = at.as_ptr().addr();
        if let Some(known) = self.0.get(&address) {
            println!("rank 0: {PAGE} bytes at this address are registered already");
            return Ok(known.clone());
        }
        // SAFETY: on purpose not kept: the device only reads, from pages that the registration pins.
        let new = unsafe { Mr::over(pd, address as u64, PAGE, Access::IBV_ACCESS_LOCAL_WRITE.0, Arc::new(())) }?;
        println!("rank 0: {PAGE} bytes registered");
        self.0.insert(address, new.clone());
        Ok(new)
    }

    /// Must be called before memory is freed.
    fn forget(&mut self, at: NonNull<u8>) {
        self.0.remove(&at.as_ptr().addr());
    }
}

pub(crate) fn run(fixed: bool) -> Result<u8> {
    // The RDMA device in user space goes by addresses, not by pages.
    if cfg!(not(feature = "verbs")) {
        return Err(Unavailable::not_built("a device that pins pages", "labs").into());
    }
    let mut pair = pair(12, 6)?;
    let mut cache = Cache::default();
    let page = page(None, b'A')?;
    send(&mut pair, &mut cache, page, b'A')?;
    if fixed {
        cache.forget(page);
    }
    // SAFETY: our own mapping; only the registration, which pins the pages, refers to it.
    unsafe { munmap(page.as_ptr().cast(), PAGE) }?;
    println!("rank 0: frees the memory, and gets other memory at the same address");
    let again = self::page(Some(page), b'B')?;
    ensure!(again == page, "the kernel gave another address");
    let got = send(&mut pair, &mut cache, again, b'B')?;
    if got == b'B' {
        return Ok(0);
    }
    Err(Announced("every call succeeded, and the bytes are those of memory that was freed".to_owned()).into())
}

/// Sends the page, which the program sees filled with `value`; the byte that arrives.
fn send(pair: &mut Pair, cache: &mut Cache, page: NonNull<u8>, value: u8) -> Result<u8> {
    // SAFETY: mapped, and written by this thread alone.
    let seen = unsafe { page.as_ptr().read_volatile() };
    ensure!(seen == value, "the page holds {seen}");
    let from = cache.register(&pair.pd, page)?;
    let to = Mr::new(&pair.pd, PAGE, Access::IBV_ACCESS_LOCAL_WRITE.0)?;
    pair.receiver.qp.post_recv(1, &to, 0..PAGE)?;
    pair.sender.qp.post_send(1, &from, 0..PAGE)?;
    pair.sender.complete()?;
    pair.receiver.complete()?;
    let got = *to.read(0..1)?.first().context("no byte")?;
    println!("rank 0: sent; the program sees {} there; rank 1 got {}", char::from(value), char::from(got));
    Ok(got)
}

/// A fresh page of `value` at `at`, or anywhere.
fn page(at: Option<NonNull<u8>>, value: u8) -> Result<NonNull<u8>> {
    let (hint, flags) = match at {
        Some(at) => (at.as_ptr().cast(), MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE),
        None => (std::ptr::null_mut(), MapFlags::PRIVATE),
    };
    // SAFETY: a new mapping, where nothing is mapped.
    let page = unsafe { mmap_anonymous(hint, PAGE, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
    let page = NonNull::new(page.cast::<u8>()).context("a mapping at address 0")?;
    // SAFETY: just mapped, for us alone.
    unsafe { page.as_ptr().write_bytes(value, PAGE) };
    Ok(page)
}

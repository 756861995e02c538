//! The RDMA device, as the probe sees it.

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use anyhow::Result;
use verbs_kit::choice::Choice;
use verbs_kit::unavailable::Unavailable;
use verbs_kit::verbs::ffi::ibv_access_flags;
use verbs_kit::verbs::{self, Local, Pd};

use crate::probe::Device;
use crate::why::Why;

/// Opens the device for `choice`, or returns the reason why there is none.
///
/// # Errors
/// There are devices, but not the requested one.
pub fn open(choice: &Choice) -> Result<Result<Rdma, Why>> {
    match Rdma::open(choice) {
        Ok(rdma) => Ok(Ok(rdma)),
        Err(error) => Ok(Err(missing(error.downcast::<Unavailable>()?))),
    }
}

/// Splits "obstacle. remedy".
fn missing(unavailable: Unavailable) -> Why {
    let text = unavailable.to_string();
    let (reason, next) = text.split_once(". ").unwrap_or((&text, "see README.md"));
    let (first, rest) = next.split_at(next.chars().next().map_or(0, char::len_utf8));
    Why::new(reason, first.to_lowercase() + rest)
}

/// A registration.
pub type Mr = Arc<verbs::Mr>;

/// `IBV_ACCESS_LOCAL_WRITE`: our own device may write here, which RECV needs. The peer gets no right at all.
const ACCESS: u32 = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;

/// An open device with a protection domain.
#[derive(Debug)]
pub struct Rdma {
    /// Device, port, GID.
    pub local: Local,
    /// The domain of all registrations and queue pairs.
    pub pd: Arc<Pd>,
}

impl Rdma {
    fn open(choice: &Choice) -> Result<Rdma> {
        let local = Local::open(choice)?;
        let pd = Pd::new(&local.context)?;
        Ok(Rdma { local, pd })
    }

    /// One line for people.
    pub fn describe(&self) -> String {
        let Local { context, gid, why, .. } = &self.local;
        format!("{} port {}, GID {gid}: {why}", context.name(), gid.port)
    }
}

impl Device for Rdma {
    type Mr = Mr;

    fn name(&self) -> &str {
        self.local.context.name()
    }

    fn is_in_user_space(&self) -> bool {
        self.name().starts_with("tinyroce")
    }

    fn ask_dmabuf(&self) -> io::Error {
        verbs::Mr::ask_dmabuf(&self.pd)
    }

    fn reg_dmabuf_mr(
        &self,
        fd: BorrowedFd<'_>,
        range: (u64, usize),
        address: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<Mr> {
        // SAFETY: the owner keeps the memory. Only raw copies access it, and none while a request is posted.
        unsafe { verbs::Mr::of_dmabuf(&self.pd, fd, range, address, ACCESS, owner) }
    }

    fn reg_mr(&self, address: u64, len: usize, owner: Arc<dyn Any + Send + Sync>) -> io::Result<Mr> {
        // SAFETY: as above.
        unsafe { verbs::Mr::over(&self.pd, address, len, ACCESS, owner) }
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_and_what_to_do_are_told_apart() {
        let why = missing(Unavailable::no_device("Function not implemented"));
        assert_eq!(why.reason, "no RDMA device here (Function not implemented)");
        assert!(
            why.next.starts_with(if cfg!(feature = "verbs") { "without `--features" } else { "the program's" }),
            "{}",
            why.next
        );
    }
}

//! File descriptors between the processes of a host, over Unix datagrams.
//!
//! Sending does not block, because a socket's queue holds more messages than there are ranks. So all ranks send,
//! synchronise, and then read their mailboxes.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use tinynccl_transport::shm::packet;

/// Bytes of a token, which only the mailbox's owner gives out.
const TOKEN: usize = 16;
/// A message: token and rank.
const MESSAGE: usize = TOKEN + 4;

/// Address for descriptors to a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address {
    /// In the kernel's table of abstract names: no file is left behind.
    name: Vec<u8>,
    token: [u8; TOKEN],
}

/// The address of this rank's mailbox.
#[derive(Debug)]
pub(crate) struct Mailbox {
    socket: OwnedFd,
    address: Address,
}

impl Mailbox {
    pub(crate) fn open() -> Result<Mailbox, Errno> {
        let mut random = [0; 2 * TOKEN];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let (name, token) = random.split_at(TOKEN);
        let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("tinynccl-cuda-{name}").into_bytes();
        let mut address = Address { name, token: [0; TOKEN] };
        address.token.copy_from_slice(token);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(&address.name)?)?;
        Ok(Mailbox { socket, address })
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Sends a descriptor; `rank` is ours.
    pub(crate) fn post(&self, to: &Address, rank: usize, descriptor: BorrowedFd<'_>) -> Result<(), Errno> {
        let mut message = [0; MESSAGE];
        message[..TOKEN].copy_from_slice(&to.token);
        message[TOKEN..].copy_from_slice(&(rank as u32).to_le_bytes());
        let to = SocketAddrUnix::new_abstract_name(&to.name)?;
        packet::send(&self.socket, Some(&to), &message, &[descriptor])
    }

    /// The received descriptors, by rank. Messages without our token are dropped.
    pub(crate) fn collect(&self) -> Result<HashMap<usize, OwnedFd>, Errno> {
        let mut all = HashMap::new();
        loop {
            let mut message = [0; MESSAGE];
            let (bytes, descriptors) = match packet::recv(&self.socket, &mut message) {
                Ok(packet) => packet,
                Err(Errno::AGAIN) => return Ok(all),
                // Longer than our messages.
                Err(Errno::INTR | Errno::MSGSIZE) => continue,
                Err(error) => return Err(error),
            };
            let (token, rank) = message.split_at(TOKEN);
            let descriptor = descriptors.into_iter().next();
            if let (MESSAGE, Some(descriptor), true) = (bytes, descriptor, token == self.address.token) {
                let rank = rank.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte));
                all.insert(rank, descriptor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn memory(text: &str) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::pwrite(&file, text.as_bytes(), 0).unwrap();
        file
    }

    fn text(file: &OwnedFd) -> String {
        let mut bytes = [0; 32];
        let count = rustix::io::pread(file, &mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    }

    #[test]
    fn everyone_finds_what_was_sent_to_it() {
        let boxes: Vec<Mailbox> = (0..8).map(|_| Mailbox::open().unwrap()).collect();
        for (rank, ours) in boxes.iter().enumerate() {
            for (peer, theirs) in boxes.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                let file = memory(&format!("{rank} to {peer}"));
                ours.post(theirs.address(), rank, file.as_fd()).unwrap();
            }
        }
        for (rank, ours) in boxes.iter().enumerate() {
            let all = ours.collect().unwrap();
            assert_eq!(all.len(), 7);
            for (peer, file) in &all {
                assert_eq!(text(file), format!("{peer} to {rank}"));
            }
            assert!(ours.collect().unwrap().is_empty());
        }
    }

    #[test]
    fn strangers_are_not_heard() {
        let (ours, stranger) = (Mailbox::open().unwrap(), Mailbox::open().unwrap());
        let guessed = Address { token: [7; TOKEN], ..ours.address().clone() };
        stranger.post(&guessed, 1, memory("wrong token").as_fd()).unwrap();
        let to = SocketAddrUnix::new_abstract_name(&ours.address().name).unwrap();
        for bytes in [&[][..], &[1; 3], &[0; 64]] {
            rustix::net::sendto(&stranger.socket, bytes, rustix::net::SendFlags::empty(), &to).unwrap();
        }
        assert!(ours.collect().unwrap().is_empty());
    }

    #[test]
    fn a_box_that_is_gone_is_an_error() {
        let ours = Mailbox::open().unwrap();
        let gone = Mailbox::open().unwrap().address().clone();
        assert_eq!(ours.post(&gone, 0, memory("").as_fd()), Err(Errno::CONNREFUSED));
    }
}

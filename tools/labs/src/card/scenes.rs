//! One request between two queue pairs, and what happens to a packet of it.

use std::sync::mpsc;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use softroce::wire::{Operation, Packet, Syndrome};
use softroce::{SendOp, Status, WcOpcode};

use super::end::{End, FIRST_PSN, Terms};
use super::wire::{Rules, Side, Wire};

/// The pause code of 40.96 ms: long enough to be seen.
const PAUSE: u8 = 24;
/// The acknowledgement timeout code of 134 ms: a busy machine does not miss it, nor has a reader to wait.
const TIMEOUT: u8 = 15;
const TERMS: Terms = Terms { mtu: 1024, timeout: TIMEOUT, retry_cnt: 6, min_rnr_timer: PAUSE };

/// A request, and the fate of its packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scene {
    /// A SEND of 3000 bytes; nothing goes wrong.
    Send,
    /// A SEND for which no receive is posted.
    Rnr,
    /// A SEND of 6000 bytes, whose second packet is lost.
    LostRequest,
    /// A SEND whose acknowledgement is lost.
    LostAck,
    /// A READ of 5000 bytes, the third packet of whose answer is lost.
    LostResponse,
    /// A fetch-and-add whose answer is lost.
    LostAtomic,
}

/// Prints every packet that passes between A and B, and how the request ends at both.
pub(crate) fn run(scene: Scene) -> Result<u8> {
    let (a, b) = (End::new(1 << 16)?, End::new(1 << 16)?);
    let mut wire = Wire::lay()?;
    a.connect(wire.peer_of(Side::A), TERMS)?;
    b.connect(wire.peer_of(Side::B), TERMS)?;
    let (refused, was_refused) = mpsc::channel();
    let mut once = true;
    let loses = move |from: Side, packet: &Packet<'_>| {
        let at = packet.headers.bth.psn.get() - FIRST_PSN;
        if matches!(packet.headers.aeth.map(|aeth| aeth.syndrome), Some(Syndrome::Rnr(_))) {
            // When it comes again, the receiver may be gone.
            let _ = refused.send(());
        }
        let hit = match scene {
            Scene::Send | Scene::Rnr => false,
            Scene::LostRequest => from == Side::A && at == 1,
            Scene::LostAck | Scene::LostAtomic => from == Side::B,
            Scene::LostResponse => packet.opcode.operation == Operation::ReadResponse && at == 2,
        };
        hit && std::mem::take(&mut once)
    };
    wire.carry(a.number(), b.number(), Rules { renews_icrc: true, loses: Box::new(loses) })?;
    match scene {
        Scene::Send | Scene::LostRequest | Scene::LostAck | Scene::Rnr => {
            let len = match scene {
                Scene::LostRequest => 6000,
                Scene::LostAck => 500,
                _ => 3000,
            };
            if scene != Scene::Rnr {
                b.recv(0, 1 << 16)?;
            }
            a.send(SendOp::Send, 0, len)?;
            if scene == Scene::Rnr {
                was_refused.recv()?;
                b.recv(0, 1 << 16)?;
            }
        }
        Scene::LostResponse => a.send(SendOp::Read(b.remote(0)), 0, 5000)?,
        Scene::LostAtomic => a.send(SendOp::FetchAdd { remote: b.remote(0), add: 1 }, 0, 8)?,
    }
    let ours = a.wait()?;
    ensure!(ours.status == Status::Success, "A's request ended with {:?}", ours.status);
    let receives = std::iter::from_fn(|| b.poll());
    let theirs: Vec<u32> = receives.filter(|wc| wc.opcode == WcOpcode::Recv).map(|wc| wc.byte_len).collect();
    wire.lines().iter().for_each(|line| println!("{line}"));
    println!("A: completion: {:?}, {:?}", ours.opcode, ours.status);
    match scene {
        Scene::LostAtomic => println!("B: the word is {}, and the program was not notified", b.word(0)?),
        Scene::LostResponse => println!("B: the program was not notified"),
        _ => println!("B: {} completion: Recv, {} B", theirs.len(), theirs.iter().sum::<u32>()),
    }
    Ok(0)
}

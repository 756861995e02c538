//! Clients that are not members yet: their hello, their proof, their registration, and the reasons to reject them.

use std::time::Instant;

use super::Loop;
use super::clients::Phase;
use super::store::Refusal;
use crate::bootstrap::wire::admission::{self, Challenge};
use crate::bootstrap::wire::frame::{Hello, MAX_PROOF, MAX_REGISTER};
use crate::bootstrap::wire::message::{Bytes, ToRank, ToStore};
use crate::seal;

impl Loop {
    pub(super) fn hello(&mut self, index: usize) -> bool {
        let Some(client) = self.clients.get_mut(index) else { return false };
        let decoded = match client.connection.decoder.hello() {
            Ok(None) => return false,
            Ok(Some(bytes)) => Hello::decode(&bytes),
            Err(e) => Err(e),
        };
        let encrypts = client.connection.is_due();
        match decoded {
            Ok((hello, true)) if encrypts => {
                client.phase = Phase::Seal { hello };
                return true;
            }
            // The other one may be a rank of this job.
            Ok((_, theirs)) if theirs != encrypts => {
                return self.reject(index, seal::differs(encrypts, theirs), true);
            }
            _ => {}
        }
        let asked = decoded.and_then(|(hello, _)| Challenge::to(hello, &self.secret, None).map_err(|e| e.to_string()));
        match asked {
            Ok((challenge, message)) => {
                // Queued behind nothing, so it fits; a failing connection shows when it is read.
                let _ = client.connection.queue(&message);
                let _ = client.connection.flush();
                client.phase = Phase::Prove { challenge };
                true
            }
            // Another version, perhaps: ours may be the job that should be gone.
            Err(reason) => self.reject(index, reason, false),
        }
    }

    /// The message of the encryption's handshake behind a hello.
    pub(super) fn seal(&mut self, index: usize, hello: Hello) -> bool {
        let Some(client) = self.clients.get_mut(index) else { return false };
        let Some(theirs) = client.connection.decoder.bytes::<{ seal::MESSAGE }>() else { return false };
        let Ok((keys, ours)) = seal::answer(&self.secret, &hello.encode(true), &theirs) else {
            return self.reject(index, admission::WRONG_SECRET.to_owned(), true);
        };
        let sent = Challenge::to(hello, &self.secret, Some((ours, keys.binding))).map_err(|e| e.to_string()).and_then(
            |(challenge, message)| {
                client.connection.queue(&message)?;
                client.connection.flush().map_err(|e| e.to_string())?;
                client.connection.seal(keys).map(|()| challenge)
            },
        );
        match sent {
            Ok(challenge) => {
                client.phase = Phase::Prove { challenge };
                true
            }
            Err(detail) => self.reject(index, detail, false),
        }
    }

    /// The answer to our challenge.
    pub(super) fn prove(&mut self, index: usize, challenge: &Challenge) -> bool {
        let Some(client) = self.clients.get_mut(index) else { return false };
        let proof = match client.connection.next::<ToStore>(MAX_PROOF) {
            Ok(None) => return false,
            Ok(Some(ToStore::Proof { proof })) => proof,
            Ok(Some(ToStore::Resume { proof, number })) => {
                return self.offer_resume(index, challenge, &proof, number);
            }
            // It has rejected our proof, and says goodbye.
            Ok(Some(ToStore::Bye { .. })) => Bytes::default(),
            // Text of an unauthenticated client does not go into our log.
            Ok(Some(_)) | Err(_) => return self.reject(index, "expected a proof".to_owned(), false),
        };
        if !challenge.is_met(&self.secret, &proof) {
            return self.reject(index, admission::WRONG_SECRET.to_owned(), true);
        }
        let hello = challenge.hello;
        let refusal = match self.store.admit(&hello) {
            Ok(_) if self.closing => Refusal { reason: "the store is closing".to_owned(), note: false, again: true },
            Ok(_) => {
                let _ = client.connection.queue(&ToRank::Welcome {
                    generation: Bytes(self.generation.to_vec()),
                    addresses: self.addresses.clone(),
                });
                let _ = client.connection.flush();
                client.phase = Phase::Register { hello_rank: hello.rank, world_size: hello.world_size };
                return true;
            }
            Err(refusal) => refusal,
        };
        self.refuse(index, refusal);
        false
    }

    /// Offers a rank that is a member, and comes again over another stream, to go on there (`resume.rs`).
    fn offer_resume(&mut self, index: usize, challenge: &Challenge, proof: &Bytes, number: u64) -> bool {
        let links = admission::link_secret(&self.secret, &self.generation);
        if !challenge.is_met_again(&links, proof) {
            return self.reject(index, admission::WRONG_SECRET.to_owned(), true);
        }
        let rank = challenge.hello.rank as usize;
        let member = self.place_of(rank).and_then(|place| self.clients.get_mut(place));
        let Some(member) = member.filter(|c| matches!(c.phase, Phase::Member { .. })) else {
            let reason = format!("rank {rank} is no member any more");
            self.refuse(index, Refusal { reason, note: false, again: false });
            return false;
        };
        // It has given this try up, and made another one since, which was faster.
        let late = number <= member.tries;
        member.tries = member.tries.max(number);
        if late {
            if let Some(client) = self.clients.get_mut(index) {
                client.phase = Phase::Gone;
            }
            return false;
        }
        let acknowledged = member.connection.account();
        // Its earlier tries are over, also those that arrive later.
        for client in &mut self.clients {
            if matches!(client.phase, Phase::Resume { rank: other, .. } if other == rank) {
                client.phase = Phase::Gone;
            }
        }
        let Some(client) = self.clients.get_mut(index) else { return false };
        let _ = client.connection.queue(&ToRank::Resumed { bytes: acknowledged });
        let _ = client.connection.flush();
        client.phase = Phase::Resume { rank, acknowledged };
        true
    }

    /// Moves the member to its other stream, once its acknowledgement arrives there.
    pub(super) fn resume(&mut self, index: usize, rank: usize, acknowledged: u64) -> bool {
        let Some(client) = self.clients.get_mut(index) else { return false };
        let taken = match client.connection.next::<ToStore>(MAX_PROOF) {
            Ok(None) => return false,
            Ok(Some(ToStore::Took { bytes })) => bytes,
            Ok(Some(_)) | Err(_) => return self.reject(index, "expected a count of bytes".to_owned(), false),
        };
        let Some(place) = self.place_of(rank) else { return false };
        let Ok([client, member]) = self.clients.get_disjoint_mut([index, place]) else { return false };
        client.phase = Phase::Gone;
        if !matches!(member.phase, Phase::Member { .. }) {
            return false;
        }
        log::info!("rendezvous store: rank {rank} goes on from {}, before from {}", client.address, member.address);
        match member.connection.go_on(&mut client.connection, taken, acknowledged) {
            Ok(()) => {
                member.address = std::mem::take(&mut client.address);
                member.over = None;
                // Then it closes its former stream. A failing connection shows when it is read.
                let bytes = member.connection.account();
                let _ = member.connection.queue(&ToRank::Took { bytes });
                let _ = member.connection.flush();
                while self.member(place, rank) {}
            }
            Err(detail) => self.fail(place, format!("it broke the protocol: {detail}")),
        }
        false
    }

    /// Refuses a client that has not proven anything. With `ours`, it may be a rank of this job with a wrong setting.
    pub(super) fn reject(&mut self, index: usize, reason: String, ours: bool) -> bool {
        let Some(client) = self.clients.get_mut(index) else { return false };
        self.rejections.note(format!("{}: {reason}", client.address));
        if ours {
            // Without its port: it comes again, from another one.
            let from = client.address.rsplit_once(':').map_or("", |(ip, _)| ip);
            self.store.note(format!("a client from {from} was refused: {reason}"));
        }
        self.say_no(index, reason, true);
        false
    }

    pub(super) fn register(&mut self, index: usize, rank: u32, world_size: u32) -> bool {
        let Some(client) = self.clients.get_mut(index) else { return false };
        let info = match client.connection.next::<ToStore>(MAX_REGISTER) {
            Ok(None) => return false,
            Ok(Some(ToStore::Register { info })) => Ok(info),
            Ok(Some(_)) => Err("the first message is not a registration".to_owned()),
            Err(e) => Err(e),
        };
        // Checked again: another client may have come with the same rank meanwhile.
        let hello = Hello { nonce: [0; 16], rank, world_size };
        let outcome = match info {
            Ok(info) => self.store.admit(&hello).map(|rank| (rank, info)),
            Err(reason) => Err(Refusal { reason, note: true, again: false }),
        };
        match outcome {
            Ok((rank, info)) => {
                log::debug!("rendezvous store: rank {rank} registered from {}", client.address);
                client.phase = Phase::Member { rank };
                self.by_rank.insert(rank, client.id);
                self.store.register(&hello, info, Instant::now());
                self.deliver();
                true
            }
            Err(refusal) => {
                self.refuse(index, refusal);
                false
            }
        }
    }

    /// Rejects a client with the reason; it is dropped once it has had time to read that.
    pub(super) fn refuse(&mut self, index: usize, refusal: Refusal) {
        let Some(client) = self.clients.get_mut(index) else { return };
        self.refused_seen.note(format!("{}: {}", client.address, refusal.reason));
        if refusal.note {
            let text = format!("a client at {} was refused: {}", client.address, refusal.reason);
            self.store.note(text.clone());
            self.store.misfit(&text);
            self.deliver();
        }
        self.say_no(index, refusal.reason, refusal.again);
    }

    fn say_no(&mut self, index: usize, reason: String, again: bool) {
        let Some(client) = self.clients.get_mut(index) else { return };
        match client.connection.queue(&ToRank::Rejected { reason, again }) {
            Ok(()) => client.start_ending(),
            Err(_) => client.phase = Phase::Gone,
        }
        self.end(index);
    }
}

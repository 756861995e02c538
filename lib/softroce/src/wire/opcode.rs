//! Opcodes: the service of the queue pair, the operation, and which packet of its message (InfiniBand specification,
//! 9.2.1).

/// The transport service, the upper three bits of an opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
}

/// Position of a packet in its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The only one.
    Only,
}

impl Position {
    /// Returns true if the packet begins a message.
    #[must_use]
    pub fn begins(self) -> bool {
        matches!(self, Position::First | Position::Only)
    }

    /// Returns true if the packet ends a message.
    #[must_use]
    pub fn ends(self) -> bool {
        matches!(self, Position::Last | Position::Only)
    }

    /// The position of a packet that begins and ends its message, or not.
    #[must_use]
    pub fn of(begins: bool, ends: bool) -> Position {
        match (begins, ends) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, false) => Position::Middle,
            (false, true) => Position::Last,
        }
    }
}

/// Operation of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Payload for a posted receive.
    Send,
    /// Payload for a posted receive, with immediate data in the last packet.
    SendImm,
    /// Payload for a posted receive, with a key to invalidate in the last packet.
    SendInv,
    /// Payload for remote memory.
    Write,
    /// Payload for remote memory, with immediate data in the last packet, which takes a posted receive.
    WriteImm,
    /// Request for remote memory.
    ReadRequest,
    /// Payload that a READ requested.
    ReadResponse,
    /// Acknowledgement, or a refusal.
    Ack,
    /// The answer to an atomic operation.
    AtomicAck,
    /// Stores a word where another is.
    CompareSwap,
    /// Adds to a word.
    FetchAdd,
}

/// An opcode, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opcode {
    /// Transport service.
    pub service: Service,
    /// Operation.
    pub operation: Operation,
    /// Position of the packet in its message.
    pub position: Position,
}

/// The lower five bits, in the order of their numbers. Numbers 4 and 5 and so on differ only by what the last packet
/// carries.
const TABLE: [(Operation, Position); 24] = {
    use Operation::*;
    use Position::*;
    [
        (Send, First),
        (Send, Middle),
        (Send, Last),
        (SendImm, Last),
        (Send, Only),
        (SendImm, Only),
        (Write, First),
        (Write, Middle),
        (Write, Last),
        (WriteImm, Last),
        (Write, Only),
        (WriteImm, Only),
        (ReadRequest, Only),
        (ReadResponse, First),
        (ReadResponse, Middle),
        (ReadResponse, Last),
        (ReadResponse, Only),
        (Ack, Only),
        (AtomicAck, Only),
        (CompareSwap, Only),
        (FetchAdd, Only),
        // 21 is reserved: `parse` refuses it, and nothing builds it.
        (Send, Only),
        (SendInv, Last),
        (SendInv, Only),
    ]
};
const RESERVED: usize = 21;

impl Opcode {
    /// Takes an opcode apart; `None` for one that no service here has.
    #[must_use]
    pub fn parse(code: u8) -> Option<Opcode> {
        let low = usize::from(code & 0x1f);
        let (operation, position) = *TABLE.get(low).filter(|_| low != RESERVED)?;
        let (service, allowed) = match code >> 5 {
            0 => (Service::Rc, true),
            1 => (Service::Uc, low <= 11),
            3 => (Service::Ud, low == 4 || low == 5),
            _ => return None,
        };
        allowed.then_some(Opcode { service, operation, position })
    }

    /// The opcode of a packet of a message of operation `operation`. First and middle packets are those of the
    /// operation without immediate data or key.
    #[must_use]
    pub fn code(service: Service, operation: Operation, position: Position) -> u8 {
        let operation = match (operation, position.ends()) {
            (Operation::SendImm | Operation::SendInv, false) => Operation::Send,
            (Operation::WriteImm, false) => Operation::Write,
            (operation, _) => operation,
        };
        let low = TABLE
            .iter()
            .enumerate()
            .position(|(i, entry)| i != RESERVED && *entry == (operation, position))
            .unwrap_or(RESERVED);
        let high = match service {
            Service::Rc => 0,
            Service::Uc => 1,
            Service::Ud => 3,
        };
        high << 5 | low as u8
    }

    /// Returns true for a request, false for an answer.
    #[must_use]
    pub fn is_request(self) -> bool {
        !matches!(self.operation, Operation::ReadResponse | Operation::Ack | Operation::AtomicAck)
    }

    /// Returns true if the packet has a RETH.
    #[must_use]
    pub fn has_reth(self) -> bool {
        match self.operation {
            Operation::Write | Operation::WriteImm => self.position.begins(),
            Operation::ReadRequest => true,
            _ => false,
        }
    }

    /// Returns true if the packet has an AETH. Middle packets of a READ response have none.
    #[must_use]
    pub fn has_aeth(self) -> bool {
        match self.operation {
            Operation::Ack | Operation::AtomicAck => true,
            Operation::ReadResponse => self.position != Position::Middle,
            _ => false,
        }
    }

    /// Returns true if the packet has an AtomicETH.
    #[must_use]
    pub fn has_atomic(self) -> bool {
        matches!(self.operation, Operation::CompareSwap | Operation::FetchAdd)
    }

    /// Returns true if the operation has immediate data.
    #[must_use]
    pub fn has_imm(self) -> bool {
        matches!(self.operation, Operation::SendImm | Operation::WriteImm)
    }

    /// Returns true if the packet may have payload.
    #[must_use]
    pub fn has_payload(self) -> bool {
        use Operation::{AtomicAck, CompareSwap, FetchAdd, ReadRequest};
        !matches!(self.operation, ReadRequest | Operation::Ack | AtomicAck | CompareSwap | FetchAdd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_their_parts_agree() {
        let known = (0..=255).filter_map(|code| Opcode::parse(code).map(|op| (code, op)));
        let mut count = 0;
        for (code, op) in known {
            assert_eq!(Opcode::code(op.service, op.operation, op.position), code);
            count += 1;
        }
        // 23 of RC, 12 of UC, 2 of UD.
        assert_eq!(count, 37);
    }

    #[test]
    fn numbers_are_those_of_the_specification() {
        use Operation::*;
        for (code, operation, position) in [
            (0x04, Send, Position::Only),
            (0x0b, WriteImm, Position::Only),
            (0x0c, ReadRequest, Position::Only),
            (0x11, Ack, Position::Only),
            (0x14, FetchAdd, Position::Only),
            (0x17, SendInv, Position::Only),
        ] {
            assert_eq!(Opcode::code(Service::Rc, operation, position), code);
        }
        assert_eq!(Opcode::code(Service::Ud, SendImm, Position::Only), 0x65);
        assert_eq!(Opcode::code(Service::Uc, Write, Position::First), 0x26);
    }
}

//! Parts of a message in a list of scatter-gather elements.

use crate::memory::{Access, Piece, Refusal, Table, copy_in};
use crate::queue::request::Sge;

/// The pieces that bytes `offset` to `offset + len` of a message are in. The list is at least that long.
pub(super) fn gather(
    table: &Table,
    pd: u32,
    sges: &[Sge],
    offset: u32,
    len: usize,
    access: Access,
    mut each: impl FnMut(Piece) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let (mut skip, mut left) = (u64::from(offset), len);
    for sge in sges {
        if left == 0 {
            break;
        }
        let skipped = skip.min(u64::from(sge.len));
        skip -= skipped;
        let take = left.min((u64::from(sge.len) - skipped) as usize);
        if take > 0 {
            let va = sge.addr.checked_add(skipped).ok_or(Refusal::Bounds)?;
            each(table.check(sge.lkey, pd, va, take, access)?)?;
            left -= take;
        }
    }
    if left == 0 { Ok(()) } else { Err(Refusal::Bounds) }
}

/// Copies `bytes` to where byte `offset` of a message goes; `ends` as for `copy_in`. Nothing is written where any of it
/// may not be.
pub(super) fn scatter(
    table: &Table,
    pd: u32,
    sges: &[Sge],
    offset: u32,
    bytes: &[u8],
    ends: bool,
) -> Result<(), Refusal> {
    gather(table, pd, sges, offset, bytes.len(), Access::LOCAL_WRITE, |_| Ok(()))?;
    let mut rest = bytes;
    gather(table, pd, sges, offset, bytes.len(), Access::LOCAL_WRITE, |piece| {
        let (part, behind) = rest.split_at(piece.len().min(rest.len()));
        rest = behind;
        // SAFETY: the caller's reference to the table is the lock; the piece was checked for writing.
        unsafe { copy_in(piece, part, ends) }
    })
}

//! The check that the buffers fit: a run that does not fit is refused before it starts, where the kernel would end a
//! rank in the middle of it.

use std::fmt;

use anyhow::Result;
use program_kit::memory::{Lack, suffices};
use tinynccl::{Comm, ReduceOp};

use crate::args::{Args, Plan};
use crate::case::Case;
use crate::memory;
use crate::record::Machine;

/// Bytes that a rank needs beside its buffers, roughly: the program, links and working memory of the library.
const BESIDE: u64 = 8 << 20;
const LESS: &str = "a smaller -e, or fewer ranks,";
/// Bytes of a host's name that are compared.
const NAME: usize = 64;

/// The first rank of a host, this or another one, has reported that the memory does not suffice.
#[derive(Debug)]
pub(crate) struct Said;

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the memory of a host does not suffice, as its first rank says")
    }
}

impl std::error::Error for Said {}

/// Bytes of a rank among `ranks`, which `--split` may divide into groups.
fn of_a_rank(args: &Args, plan: &Plan, ranks: usize) -> Result<u64> {
    if args.explain && !args.measure {
        return Ok(0);
    }
    let ranks = args.split.as_ref().map_or(ranks, |split| split.largest(ranks));
    let cases = plan.cases(ranks).map_err(anyhow::Error::msg)?;
    let row = |case: &Case, bytes| {
        let layout = case.layout(bytes, ranks);
        [layout.input, layout.output].map(|elements| (elements * case.dtype.size()) as u64)
    };
    let rows = cases.iter().flat_map(|case| plan.rows_of(case, ranks).into_iter().map(move |bytes| row(case, bytes)));
    let rows = rows.reduce(|a, b| [a[0].max(b[0]), a[1].max(b[1])]).unwrap_or_default();
    Ok(memory::touched(rows, plan.largest(&cases, ranks), args.buffers) + BESIDE)
}

/// For `ranks` ranks that are about to be started on this machine.
pub(crate) fn on_this_machine(args: &Args, plan: &Plan, ranks: usize) -> Result<()> {
    let each = of_a_rank(args, plan, ranks)?;
    Ok(suffices(format_args!("{ranks} ranks"), each * ranks as u64, LESS)?)
}

/// For ranks that a launcher has started: all fail, and the first rank of a host without enough memory reports it.
pub(crate) fn on_every_host(comm: &Comm, args: &Args, plan: &Plan) -> Result<()> {
    let each = of_a_rank(args, plan, comm.size())?;
    let mut name = [0u8; NAME];
    name.iter_mut().zip(Machine::here().host.bytes()).for_each(|(to, from)| *to = from);
    let mut names = vec![0u8; NAME * comm.size()];
    comm.all_gather(&name, &mut names)?;
    let here: Vec<usize> = (0..comm.size()).filter(|&rank| names[rank * NAME..][..NAME] == name).collect();
    let ours = here.first() == Some(&comm.rank());
    let count = here.len() as u64;
    let lack: Option<Lack> = ours
        .then(|| suffices(format_args!("{count} ranks of host {}", Machine::here().host), each * count, LESS).err())
        .flatten();
    let mut lacking = [u8::from(lack.is_some())];
    comm.all_reduce_in_place(&mut lacking, ReduceOp::Max)?;
    match lack {
        Some(lack) => Err(lack.into()),
        None if lacking == [0] => Ok(()),
        None => Err(Said.into()),
    }
}

//! The program: the report, and the two sides.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use verbs_kit::alone;
use verbs_kit::say;
use verbs_kit::side::Side;

use crate::buffer::{self, Buffer};
use crate::cli::{Cli, Mode};
use crate::pattern;
use crate::probe::{self, Path, Probe, Stage, peer_memory};
use crate::rdma::{self, Rdma};
use crate::report;
use crate::terms::{Terms, WireChoice};
use crate::transfer::Transfer;
use crate::why::Why;
use crate::wire::Wire;
use crate::wire::tcp::Tcp;

/// Our end of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Receives and checks.
    Server,
    /// Fills and sends.
    Client,
}

/// Executes the command line.
///
/// # Errors
/// [`Why`] when something requested is not available here; any other error is a failure.
pub fn run(cli: &Cli) -> Result<()> {
    if let Some(side) = &cli.choice.side {
        verbs_kit::say::set_side(side);
    }
    match &cli.mode {
        Some(Mode::Probe) => look(cli),
        Some(Mode::Server { listen }) => {
            let here = Here::open(cli)?;
            let listener = alone::listener(listen)?;
            here.talk(cli, Role::Server, Side::accept(&listener, cli.choice.timeout)?)
        }
        Some(Mode::Client { address }) => {
            let here = Here::open(cli)?;
            here.talk(cli, Role::Client, Side::connect(address, cli.choice.timeout)?)
        }
        None => {
            // Printed once here, not by both children.
            look(cli)?;
            alone::both_sides(&["--brief"], &["--brief"])
        }
    }
}

/// Reports the hardware and the path that a run would use.
fn look(cli: &Cli) -> Result<()> {
    let here = Here::open(cli)?;
    let device = here.rdma.as_ref().map_err(Why::clone);
    here.probe(cli, device, cli.data.brief).map(|_| ())
}

/// This process's resources.
struct Here {
    buffer: Box<dyn Buffer>,
    rdma: Result<Rdma, Why>,
}

impl Here {
    fn open(cli: &Cli) -> Result<Here> {
        let data = &cli.data;
        let rdma = match data.wire {
            WireChoice::Tcp => Err(Why::new("RDMA is not wanted (--wire tcp)", "leave out --wire tcp")),
            WireChoice::Auto => rdma::open(&cli.choice)?,
            WireChoice::Verbs => Ok(rdma::open(&cli.choice)??),
        };
        let buffer = buffer::take(data.buffer, data.gpu, data.bytes, data.slots)?;
        Ok(Here { buffer, rdma })
    }

    /// Finds the path to the memory for a wire over `device`, and reports it.
    fn probe(&self, cli: &Cli, device: Result<&Rdma, Why>, brief: bool) -> Result<(Stage, Path<rdma::Mr>)> {
        let probe = Probe {
            buffer: &*self.buffer,
            device,
            peer_module: peer_memory::loaded_module(FilePath::new("/sys/module")),
            staging: cli.data.plan().staging(),
        };
        let wire = match &probe.device {
            Ok(rdma) => Ok(format!("RDMA, {}", rdma.describe())),
            Err(why) => Err(why.clone()),
        };
        let outcome = probe::run(&probe, cli.data.path)?;
        for line in &outcome.lines {
            log::info!("{}: {:?}", line.stage, line.outcome);
        }
        if !brief {
            for line in report::here(&self.buffer.describe(), self.buffer.instead_of_gpu(), wire.as_deref()) {
                say!("{line}");
            }
            for line in report::stages(&outcome.lines) {
                say!("{line}");
            }
        }
        match (outcome.taken, cli.data.path) {
            (Some((stage, path)), _) => Ok((stage, path)),
            (None, Some(stage)) => Err(report::refused(&outcome.lines, stage).into()),
            (None, None) => Err(anyhow!("no stage was taken")),
        }
    }

    fn talk(&self, cli: &Cli, role: Role, mut side: Side) -> Result<()> {
        let data = &cli.data;
        let plan = data.plan();
        let (chunk, rounds, wire) = (plan.chunk, data.rounds, data.wire);
        let mine = Terms { bytes: plan.bytes, chunk, rounds, wire, rdma: self.rdma.is_ok() };
        side.send(&mine.to_string())?;
        let line = side.receive("terms")?;
        let theirs: Terms = line.parse().map_err(|e| anyhow!("{} is no cuda-verbs: {e}", side.peer()))?;
        let over_rdma = mine.agree(&theirs).map_err(|e| anyhow!(e))?;
        log::info!("we offer {mine}, {} offers {theirs}: over RDMA {over_rdma}", side.peer());
        let device = match &self.rdma {
            Ok(rdma) if over_rdma => Ok(rdma),
            Ok(_) => Err(Why::new("the other side has no RDMA device, or wants none", "see what the other side says")),
            Err(why) => Err(why.clone()),
        };
        let named = device.as_ref().map_or("TCP".to_owned(), |rdma| format!("RDMA ({})", probe::Device::name(*rdma)));
        let (stage, path) = self.probe(cli, device, data.brief)?;
        say!("{stage} over {named}");
        let staging = match &path {
            Path::Staged(staging, _) => Some(Arc::clone(staging)),
            Path::Direct(_) => None,
        };
        let mut wire = self.connect(path, &mut side, plan.slots, role)?;
        for round in 1..=rounds {
            if role == Role::Client {
                pattern::fill(&*self.buffer, round)?;
            }
            side.meet(&format!("round {round}"))?;
            let start = Instant::now();
            let staging = staging.as_deref();
            let patience = cli.choice.timeout;
            let mut transfer = Transfer { plan, buffer: &*self.buffer, staging, wire: &mut *wire, patience };
            match role {
                Role::Client => transfer.send(),
                Role::Server => transfer.receive(),
            }?;
            side.meet("landed")?;
            let seconds = start.elapsed().as_secs_f64();
            if role == Role::Server {
                pattern::check(&*self.buffer, round).context("what came is not what was sent")?;
                say!("round {round}: every byte checked");
            } else {
                let (bytes, chunks) = (plan.bytes, plan.chunks());
                let rate = report::rate(bytes, seconds);
                say!("round {round}: {bytes} bytes in {chunks} chunks, {:.1} ms, {rate}", seconds * 1e3);
            }
            side.meet("checked")?;
        }
        // The peer's device may still need an acknowledgement from ours.
        side.meet("done")?;
        say!("done");
        Ok(())
    }

    /// The wire over `path`: TCP when its memory is not registered.
    fn connect(&self, path: Path<rdma::Mr>, side: &mut Side, slots: usize, role: Role) -> Result<Box<dyn Wire>> {
        match path {
            Path::Staged(staging, None) => Ok(Box::new(Tcp::new(side.stream(), staging)?)),
            Path::Staged(_, Some(mr)) | Path::Direct(mr) => self.over_rdma(mr, side, slots, role),
        }
    }

    fn over_rdma(&self, mr: rdma::Mr, side: &mut Side, slots: usize, role: Role) -> Result<Box<dyn Wire>> {
        let rdma = self.rdma.as_ref().map_err(Why::clone)?;
        Ok(Box::new(crate::wire::verbs::Verbs::connect(rdma, side, mr, slots, role == Role::Client)?))
    }
}

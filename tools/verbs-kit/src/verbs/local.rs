//! Our end of a connection: the device, port, GID and MTU chosen from the options and the tables.

use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, bail, ensure};

use super::{Context, Port, devices};
use crate::choice::Choice;
use crate::gid::{self, GidRow};

/// The choice and its reason.
#[derive(Debug)]
pub struct Local {
    /// The open device.
    pub context: Arc<Context>,
    /// The port's attributes.
    pub port: Port,
    /// The chosen entry of the GID table.
    pub gid: GidRow,
    /// The reason for this GID.
    pub why: String,
    /// The MTU we offer, in bytes.
    pub mtu: u32,
}

impl Local {
    /// Chooses a device and opens it. An error lists the available devices or entries when the requested one is
    /// missing.
    pub fn open(choice: &Choice) -> Result<Local> {
        Local::by_rank(choice, gid::usual)
    }

    /// [`Local::open`] with another preference among the port's GIDs.
    pub fn by_rank(choice: &Choice, rank: gid::Rank) -> Result<Local> {
        let devices = devices()?;
        let device = match &choice.device {
            Some(name) => devices.iter().find(|d| d.name == *name).ok_or_else(|| {
                let names: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
                anyhow!("there is no RDMA device called {name} (--device); there are: {}", names.join(", "))
            })?,
            None => devices
                .iter()
                .find(|d| d.gids.as_ref().is_ok_and(|rows| rows.iter().any(|r| r.port == choice.port)))
                .or(devices.first())
                .context("no device")?,
        };
        let context = Context::open(&device.name)?;
        let port = context.port(choice.port)?;
        let rows = match &device.gids {
            Ok(rows) => rows.iter().filter(|r| r.port == choice.port).cloned().collect::<Vec<_>>(),
            Err(cause) => bail!("the GID table of {}: {cause}", device.name),
        };
        let name = format!("{} port {}", device.name, choice.port);
        let (gid, why) = gid::choose(&rows, &name, choice.gid_index, rank).map_err(|e| anyhow!(e))?;
        ensure!(gid.index <= 255, "GID index {} of {name}: an address vector has 8 bits for it", gid.index);
        if let Some(mtu) = choice.mtu {
            ensure!(
                mtu <= port.active_mtu,
                "--mtu {mtu}: the active MTU of {name} is {}; the network device's MTU must hold it and the \
                 headers",
                port.active_mtu
            );
        }
        let mtu = choice.mtu.unwrap_or(port.active_mtu);
        log::info!("{name}: GID {} of {} ({why}), MTU {mtu}", gid.index, rows.len());
        Ok(Local { context, port, gid: gid.clone(), why, mtu })
    }
}

//! Server and client: sets up the side channel, then runs the hello over either interface.

use anyhow::{Result, ensure};
use verbs_kit::alone;
use verbs_kit::choice::Choice;
use verbs_kit::say;
use verbs_kit::side::Side;
use verbs_kit::verbs::Local;

use crate::cli::{Api, Talk};
use crate::gid::rank;
use crate::hello;
use crate::requests::Role;

pub(crate) fn server(listen: &str, choice: &Choice, talk: &Talk) -> Result<()> {
    // Open the device first: without one there is no reason to listen.
    let local = Local::by_rank(choice, rank)?;
    let listener = alone::listener(listen)?;
    let side = Side::accept(&listener, choice.timeout)?;
    converse(Role::Server, local, side, choice, talk)
}

pub(crate) fn client(address: &str, choice: &Choice, talk: &Talk) -> Result<()> {
    let local = Local::by_rank(choice, rank)?;
    let side = Side::connect(address, choice.timeout)?;
    converse(Role::Client, local, side, choice, talk)
}

fn converse(role: Role, local: Local, side: Side, choice: &Choice, talk: &Talk) -> Result<()> {
    say!("side channel: TCP with {}", side.peer());
    say!("device {}, port {}, GID {}: {}", local.context.name(), local.gid.port, local.gid, local.why);
    let text = talk.text.clone().unwrap_or_else(|| match role {
        Role::Server => "Hello client, this is the server.".to_owned(),
        Role::Client => "Hello server, this is the client.".to_owned(),
    });
    ensure!((1..=1 << 20).contains(&text.len()), "--text: {} bytes, expected 1 to 1048576", text.len());
    match talk.api {
        Api::Steps => hello::run(role, &local, side, choice, talk, &text),
        #[cfg(feature = "verbs")]
        Api::Safe => crate::safe::run(role, &local, side, choice, talk, &text),
        #[cfg(not(feature = "verbs"))]
        Api::Safe => Err(verbs_kit::unavailable::Unavailable::not_built("--api safe", "verbs-hello").into()),
    }
}

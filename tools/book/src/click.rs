//! Pages that `tinynccl-cli` made (`schedule --format html`, `replay`), in a browser: every button and key, the bytes
//! that are counted, errors in the console, and something drawn, as a desktop and as a phone shows it.

mod replay;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::browser::{self, Browser};
use crate::look::SCREENS;

/// The visible frames.
const SHOWN: &str =
    "[...document.querySelectorAll('.frame')].map((f, i) => getComputedStyle(f).display === 'none' ? -1 : i)
    .filter(i => i >= 0)";
/// Bytes that all ranks have sent, by the page's table.
const TOTAL: &str = "[...document.querySelectorAll('td[data-link$=all]')].reduce((all, td) =>
    all + Number(td.textContent.replaceAll(',', '')), 0)";
/// Bytes that the page was made with, before its script counts.
const PLANNED: &str = "sent.flat().reduce((all, [from, to, bytes]) => all + bytes, 0)";
/// Bytes of the round that the page begins with.
const BEGUN: &str = "sent[0].reduce((all, [from, to, bytes]) => all + bytes, 0)";
/// Messages in flight.
const TRAVELLING: &str = "document.getAnimations().filter(a => a.animationName === 'travel').length";
const SLOWER: &str = "(() => { const s = document.querySelector('#speed'), before = seconds(); s.value = '0.5'; \
    s.onchange(); return seconds() === 2 * before; })()";
const OVERFLOW: &str = "Math.max(0, document.documentElement.scrollWidth - document.documentElement.clientWidth)";
const FRAMES: &str = "document.querySelectorAll('.frame').length";
const AT_THE_END: &str = "document.querySelector('#forward').disabled";
const PLAY: &str = "document.querySelector('#play').textContent";
/// A picture with fewer colours shows nothing.
const COLOURS: u64 = 8;

/// Checks all pages and reports the faults of each. Screenshots go into a folder.
pub(crate) fn run(pages: &[PathBuf], pictures: &Path) -> Result<()> {
    let program = browser::program().context("no chromium on the PATH: scripts/setup.sh --chromium")?;
    fs::create_dir_all(pictures).with_context(|| pictures.display().to_string())?;
    let mut browser = Browser::start(&program)?;
    let mut wrong = 0;
    for page in pages {
        let page = fs::canonicalize(page).with_context(|| page.display().to_string())?;
        for (wide, high, phone) in SCREENS {
            browser.screen(wide, high, phone)?;
            let stem = page.file_stem().unwrap_or_default().to_string_lossy();
            match check(&mut browser, &page, &pictures.join(format!("{stem}.{wide}.png"))) {
                Ok(rounds) => println!("ok      {stem} at {wide}: {rounds} steps"),
                Err(error) => {
                    wrong += 1;
                    println!("FAILED  {stem} at {wide}: {error:#}");
                }
            }
        }
    }
    ensure!(wrong == 0, "{wrong} things to mend on {} pages", pages.len());
    Ok(())
}

/// Steps through a page, forwards and backwards; how many rounds or calls it has.
fn check(browser: &mut Browser, page: &Path, picture: &Path) -> Result<u64> {
    browser.open(page)?;
    if browser.evaluate(replay::IS_ONE)? == json!(true) {
        return replay::check(browser, page, picture);
    }
    let rounds = number(browser, FRAMES)?.saturating_sub(1);
    let planned = number(browser, PLANNED)?;
    ensure!(rounds > 0 && planned > 0, "{rounds} rounds and {planned} bytes");
    expect(browser, "at the start, frames shown", SHOWN, json!([0]))?;
    // It begins with the first round, whose messages are counted.
    let begun = number(browser, BEGUN)?;
    expect(browser, "at the start, bytes sent", TOTAL, json!(begun))?;
    expect(browser, "at the start, pixels wider than the window", OVERFLOW, json!(0))?;
    expect(browser, "half the speed takes twice as long", SLOWER, json!(true))?;
    let mut before = begun;
    for at in 1..=rounds {
        if at % 2 == 1 {
            browser.click("#forward")?
        } else {
            browser.key("ArrowRight")?
        }
        expect(browser, &format!("after {at} steps, frames shown"), SHOWN, json!([at]))?;
        expect(browser, &format!("after {at} steps, pixels wider than the window"), OVERFLOW, json!(0))?;
        let messages = number(browser, &format!("sent[{at}].length"))?;
        expect(browser, &format!("after {at} steps, messages that travel"), TRAVELLING, json!(messages))?;
        let total = number(browser, TOTAL)?;
        ensure!(total >= before, "bytes sent fell from {before} to {total} in round {at}");
        before = total;
        if at == rounds.div_ceil(2) {
            fs::write(picture, browser.screenshot(None)?)?;
            let seen = browser.colours("svg")?;
            ensure!(seen >= COLOURS, "the picture has {seen} colours: nothing was drawn");
        }
    }
    expect(browser, "at the end, bytes sent", TOTAL, json!(planned))?;
    expect(browser, "at the end, Forward is disabled", AT_THE_END, json!(true))?;
    browser.key("ArrowLeft")?;
    expect(browser, "after a step back, frames shown", SHOWN, json!([rounds - 1]))?;
    browser.click("#back")?;
    expect(browser, "after Back, frames shown", SHOWN, json!([rounds.saturating_sub(2)]))?;
    for (key, frame) in [("End", rounds), ("Home", 0)] {
        browser.key(key)?;
        expect(browser, &format!("after {key}, frames shown"), SHOWN, json!([frame]))?;
    }
    for says in ["Stop", "Play"] {
        browser.click("#play")?;
        expect(browser, "after a click, the button Play says", PLAY, json!(says))?;
    }
    let complaints = browser.complaints();
    ensure!(complaints.is_empty(), "errors in the console: {}", complaints.join("; "));
    Ok(rounds)
}

fn number(browser: &mut Browser, expression: &str) -> Result<u64> {
    let value = browser.evaluate(expression)?;
    value.as_u64().with_context(|| format!("{expression} is {value}"))
}

fn expect(browser: &mut Browser, what: &str, expression: &str, expected: Value) -> Result<()> {
    let got = browser.evaluate(expression)?;
    if got != expected {
        bail!("{what}: expected {expected}, got {got}");
    }
    Ok(())
}

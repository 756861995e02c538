//! Pages that play a run: every call, the messages, the scrubber, the keys and the button Play, in both themes.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::json;

use super::{COLOURS, OVERFLOW, PLAY, expect, number};
use crate::browser::Browser;

/// Expression that is true if the open page plays a run.
pub(super) const IS_ONE: &str = "!!document.querySelector('canvas.lines')";
/// Numbers in the data, before the script reads them.
const MESSAGES: &str =
    "JSON.parse(document.querySelector('#data').textContent).reduce((all, r) => all + r.messages.length / 4, 0)";
const CALLS: &str = "starts.length";
/// Calls that have begun, by the words under the scrubber.
const MADE: &str = "Number(document.querySelector('#at').textContent.match(/call ([0-9]+) of/)[1])";
/// Ranks whose words are shown, less those of the data.
const UNSAID: &str = "runs.reduce((all, r) => all + r.ranks.length, 0) -
    [...document.querySelectorAll('.states li')].filter(li => /^rank [0-9]+: ./.test(li.textContent)).length";
/// Messages in flight in the picture.
const FLYING: &str = "runs.reduce((all, r) => all + r.flying, 0)";
const SCRUB: &str = "(() => { const s = document.querySelector('#scrub'); s.value = 10000; s.oninput({target: s}); \
    return now === end; })()";
const CLOSER: &str = "(() => { const before = wide; document.querySelector('#in').click(); return wide < before; })()";
/// Calls and messages that are stepped through.
const STEPS: u64 = 12;

/// Steps through the page; how many calls it has.
pub(super) fn check(browser: &mut Browser, page: &Path, picture: &Path) -> Result<u64> {
    let (calls, messages) = (number(browser, CALLS)?, number(browser, MESSAGES)?);
    expect(browser, "messages that the script has", "middles.length", json!(messages))?;
    expect(browser, "ranks without words", UNSAID, json!(0))?;
    expect(browser, "at the start, pixels wider than the window", OVERFLOW, json!(0))?;
    // A page opens where messages are; here it is played from the first call on.
    browser.evaluate("go(starts.length ? starts[0] : begin)")?;
    for at in 2..=calls.min(STEPS) {
        if at % 2 == 0 {
            browser.click("#call")?
        } else {
            browser.key("ArrowRight")?
        }
        expect(browser, &format!("after {} steps, calls begun", at - 1), MADE, json!(at))?;
    }
    browser.evaluate("go(begin)")?;
    for at in 1..=messages.min(STEPS) {
        browser.click("#message")?;
        ensure!(number(browser, FLYING)? > 0, "after {at} clicks on Next message, none is in flight");
        expect(browser, "ranks without words", UNSAID, json!(0))?;
    }
    expect(browser, "in the middle, pixels wider than the window", OVERFLOW, json!(0))?;
    expect(browser, "the button closer shows less time", CLOSER, json!(true))?;
    for theme in ["dark", "light"] {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": theme }] });
        browser.call("Emulation.setEmulatedMedia", features)?;
        // A page follows its system's theme when it is opened.
        browser.open(page)?;
        browser.evaluate("go(begin)")?;
        for _ in 0..messages.min(STEPS) {
            browser.click("#message")?;
        }
        let dark = theme == "dark";
        expect(browser, "dark", "document.documentElement.classList.contains('dark')", json!(dark))?;
        let path = if dark { picture.with_extension("dark.png") } else { picture.to_owned() };
        fs::write(path, browser.screenshot(None)?)?;
        for canvas in ["canvas.stage", "canvas.lines"] {
            let seen = browser.colours(canvas)?;
            ensure!(seen >= COLOURS, "{theme}: {canvas} has {seen} colours: nothing was drawn");
        }
    }
    for says in ["Stop", "Play"] {
        browser.click("#play")?;
        expect(browser, "after a click, the button Play says", PLAY, json!(says))?;
    }
    expect(browser, "the scrubber's end is the end", SCRUB, json!(true))?;
    expect(browser, "at the end, Next call is disabled", "document.querySelector('#call').disabled", json!(true))?;
    browser.key("ArrowLeft")?;
    expect(browser, "after a step back, calls begun", MADE, json!(calls))?;
    let complaints = browser.complaints();
    ensure!(complaints.is_empty(), "errors in the console: {}", complaints.join("; "));
    Ok(calls)
}

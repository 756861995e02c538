//! A headless Chromium, controlled with its DevTools protocol over two pipes.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// The longest wait for an answer or an event.
const LIMIT: Duration = Duration::from_secs(30);

/// A running browser with one page.
#[derive(Debug)]
pub(crate) struct Browser {
    child: Child,
    folder: PathBuf,
    requests: File,
    answers: Receiver<Value>,
    session: String,
    last: u64,
    /// Events that arrived during a wait for something else.
    events: Vec<Value>,
}

/// Chromium: what `CHROMIUM` names, or one of its usual names on the `PATH`.
pub(crate) fn program() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("CHROMIUM") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&path).flat_map(|p| names.map(|n| p.join(n))).find(|p| p.is_file())
}

impl Browser {
    pub(crate) fn start(program: &Path) -> Result<Browser> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("tinynccl-book-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let (to, from) = (folder.join("requests"), folder.join("answers"));
        for pipe in [&to, &from] {
            if !Command::new("mkfifo").arg(pipe).status().context("starting mkfifo")?.success() {
                bail!("mkfifo {} failed", pipe.display());
            }
        }
        // Chromium reads requests from descriptor 3 and answers on 4; a shell can set them, without unsafe code here.
        let script = "exec \"$0\" --headless --no-sandbox --disable-gpu --disable-quic --no-first-run \
            --disable-background-networking --disable-component-update --disable-sync --hide-scrollbars \
            --allow-file-access-from-files --remote-debugging-pipe --user-data-dir=\"$1\" about:blank 3<\"$2\" 4>\"$3\"";
        let child = Command::new("sh")
            .args(["-c", script])
            .args([program, &folder.join("profile"), &to, &from])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting Chromium")?;
        // In the order in which the shell opens them: each open waits for the other side.
        let requests = OpenOptions::new().write(true).open(&to)?;
        let answers = File::open(&from)?;
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(0) {
                let Some(value) = message.ok().and_then(|m| serde_json::from_slice(&m).ok()) else { return };
                if sender.send(value).is_err() {
                    return;
                }
            }
        });
        let mut browser =
            Browser { child, folder, requests, answers: receiver, session: String::new(), last: 0, events: vec![] };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach)?;
        browser.session = session["sessionId"].as_str().context("no session")?.to_owned();
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    /// Calls a method and returns its result.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.last += 1;
        let id = self.last;
        let mut request = json!({ "id": id, "method": method, "params": params });
        if !self.session.is_empty() {
            request["sessionId"] = self.session.clone().into();
        }
        let mut bytes = serde_json::to_vec(&request)?;
        bytes.push(0);
        self.requests.write_all(&bytes).with_context(|| format!("asking Chromium for {method}"))?;
        let answer = self.await_message(method, |m| m["id"] == id)?;
        if let Some(error) = answer.get("error") {
            bail!("{method}: {error}");
        }
        Ok(answer["result"].clone())
    }

    fn await_message(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let end = Instant::now() + LIMIT;
        loop {
            match self.answers.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(message) if wanted(&message) => return Ok(message),
                Ok(event) => self.events.push(event),
                Err(RecvTimeoutError::Timeout) => bail!("Chromium did not answer {what} in {} s", LIMIT.as_secs()),
                Err(RecvTimeoutError::Disconnected) => bail!("Chromium ended while {what} was awaited"),
            }
        }
    }

    /// The size of the window in CSS pixels, and whether it is a phone's.
    pub(crate) fn screen(&mut self, wide: u32, high: u32, phone: bool) -> Result<()> {
        let screen = json!({ "width": wide, "height": high, "deviceScaleFactor": 1, "mobile": phone });
        self.call("Emulation.setDeviceMetricsOverride", screen).map(drop)
    }

    /// Opens a file, by its full path, and waits until it and its resources are loaded.
    pub(crate) fn open(&mut self, page: &Path) -> Result<()> {
        self.events.clear();
        let answer = self.call("Page.navigate", json!({ "url": format!("file://{}", page.display()) }))?;
        if let Some(error) = answer["errorText"].as_str() {
            bail!("{}: {error}", page.display());
        }
        let loaded = |m: &Value| m["method"] == "Page.loadEventFired";
        if !self.events.iter().any(loaded) {
            let event = self.await_message("a page", loaded)?;
            self.events.push(event);
        }
        Ok(())
    }

    /// Errors that the page wrote to the console, threw, or had while loading, since it was opened.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let text = |event: &Value| {
            let params = &event["params"];
            match event["method"].as_str()? {
                "Runtime.exceptionThrown" => {
                    let details = &params["exceptionDetails"];
                    Some(format!("{} {}", details["text"], details["exception"]["description"]))
                }
                "Runtime.consoleAPICalled" if params["type"] == "error" => Some(params["args"].to_string()),
                "Log.entryAdded" if params["entry"]["level"] == "error" => {
                    Some(format!("{} {}", params["entry"]["text"], params["entry"]["url"]))
                }
                _ => None,
            }
        };
        self.events.iter().filter_map(text).collect()
    }

    /// The value of a JavaScript expression.
    pub(crate) fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", params)?;
        if let Some(error) = result.get("exceptionDetails") {
            bail!("{error}");
        }
        Ok(result["result"]["value"].clone())
    }

    /// Clicks with the mouse in the middle of an element; fails where another element would receive the click.
    pub(crate) fn click(&mut self, selector: &str) -> Result<()> {
        let place = self.evaluate(&format!(
            "(e => {{ if (!e) return null; e.scrollIntoView({{block: 'center'}});
             const r = e.getBoundingClientRect(), x = r.x + r.width / 2, y = r.y + r.height / 2;
             return e.contains(document.elementFromPoint(x, y)) ? [x, y] : null; }})(document.querySelector({}))",
            json!(selector)
        ))?;
        let (Some(x), Some(y)) = (place[0].as_f64(), place[1].as_f64()) else { bail!("{selector} cannot be clicked") };
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": x, "y": y, "button": "left", "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", event)?;
        }
        Ok(())
    }

    /// Presses a key, such as `ArrowLeft`.
    pub(crate) fn key(&mut self, name: &str) -> Result<()> {
        for kind in ["rawKeyDown", "keyUp"] {
            self.call("Input.dispatchKeyEvent", json!({ "type": kind, "key": name, "code": name }))?;
        }
        Ok(())
    }

    /// PNG of the whole page, or of a part of it.
    pub(crate) fn screenshot(&mut self, clip: Option<Value>) -> Result<Vec<u8>> {
        Ok(base64(&self.screenshot_text(clip)?))
    }

    /// Takes a screenshot as PNG in base 64: of `clip` alone if there is one, else of the whole page.
    fn screenshot_text(&mut self, clip: Option<Value>) -> Result<String> {
        let mut params = json!({ "format": "png", "captureBeyondViewport": true });
        if let Some(clip) = clip {
            params["clip"] = clip;
        }
        let shot = self.call("Page.captureScreenshot", params)?;
        Ok(shot["data"].as_str().context("no picture")?.to_owned())
    }

    /// The number of colours of an element, drawn 160 pixels wide. The browser itself decodes the picture.
    pub(crate) fn colours(&mut self, selector: &str) -> Result<u64> {
        let clip = self.evaluate(&format!(
            "(r => ({{x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height, scale: 160 / r.width}}))
             (document.querySelector({}).getBoundingClientRect())",
            json!(selector)
        ))?;
        let picture = self.screenshot_text(Some(clip))?;
        let colours = self.evaluate(&format!(
            "(async () => {{ const image = new Image(); image.src = 'data:image/png;base64,{picture}'; await image.decode();
             const context = new OffscreenCanvas(image.width, image.height).getContext('2d'); context.drawImage(image, 0, 0);
             const bytes = context.getImageData(0, 0, image.width, image.height).data;
             return new Set(new Uint32Array(bytes.buffer)).size; }})()"
        ))?;
        colours.as_u64().with_context(|| format!("{selector}: {colours} colours"))
    }
}

fn base64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut out, mut bits, mut count) = (Vec::with_capacity(text.len() * 3 / 4), 0_u32, 0);
    for v in text.bytes().filter_map(value) {
        bits = bits << 6 | u32::from(v);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    out
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_all_lengths() {
        assert_eq!(base64("TWFu"), b"Man");
        assert_eq!(base64("TWE="), b"Ma");
        assert_eq!(base64("TQ=="), b"M");
    }
}

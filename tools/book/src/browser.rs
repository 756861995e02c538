//! A headless Chromium, spoken to by its DevTools protocol over two pipes.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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
    /// What came while something else was awaited.
    events: Vec<Value>,
}

/// Chromium, by its usual names.
pub(crate) fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&path).flat_map(|p| names.map(|n| p.join(n))).find(|p| p.is_file())
}

impl Browser {
    pub(crate) fn start(program: &Path) -> Result<Browser> {
        let folder = std::env::temp_dir().join(format!("tinynccl-book-{}", std::process::id()));
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

    /// Opens a page and waits until it and what it refers to are loaded. Returns what it complained about meanwhile.
    pub(crate) fn open(&mut self, url: &str) -> Result<()> {
        self.events.clear();
        self.call("Page.navigate", json!({ "url": url }))?;
        let loaded = |m: &Value| m["method"] == "Page.loadEventFired";
        if !self.events.iter().any(loaded) {
            let event = self.await_message("a page", loaded)?;
            self.events.push(event);
        }
        Ok(())
    }

    /// Errors that the page wrote to the console, threw, or had while loading.
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
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

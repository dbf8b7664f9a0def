//! A real browser for tests: Debian's chromium, driven by chromedriver over WebDriver.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::machine;

/// How long anything on the page may take to appear: the browser shares the machine with everything else.
const PATIENCE: Duration = Duration::from_secs(60);

/// Keys without a character, as WebDriver names them.
pub const ENTER: &str = "\u{e007}";
/// The key that closes a dialog.
pub const ESCAPE: &str = "\u{e00c}";
/// The arrow that points down.
pub const DOWN: &str = "\u{e015}";

/// A browser without a window; it ends when this is dropped.
#[derive(Debug)]
pub struct Browser {
    driver: Child,
    port: u16,
    session: String,
    profile: TempDir,
}

impl Browser {
    /// Starts a browser whose window has this size.
    pub fn start(width: u32, height: u32) -> Result<Self> {
        let mut driver = machine::command("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("start chromedriver: testbed/deps.sh installs it")?;
        let mut lines = BufReader::new(driver.stdout.take().context("its output is piped")?).lines();
        let port = lines
            .find_map(|line| {
                line.ok()?.split("successfully on port ").nth(1)?.trim_end_matches('.').parse().ok()
            })
            .context("chromedriver does not say its port")?;
        // Whoever writes to a pipe that nobody reads stops some day.
        std::thread::spawn(move || lines.for_each(drop));
        let profile = TempDir::new()?;
        let mut browser = Self { driver, port, session: String::new(), profile };
        let directory = format!("--user-data-dir={}", browser.profile.path().display());
        let size = format!("--window-size={width},{height}");
        let arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--hide-scrollbars",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            &directory,
            &size,
        ];
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "goog:loggingPrefs": { "browser": "ALL" },
            "goog:chromeOptions": { "args": arguments },
        } } });
        let made = browser.send("POST", "/session", &wanted)?;
        made["sessionId"].as_str().context("a session has an id")?.clone_into(&mut browser.session);
        Ok(browser)
    }

    /// One request of WebDriver.
    fn send(&self, method: &str, path: &str, body: &Value) -> Result<Value> {
        let body = if method == "POST" { body.to_string() } else { String::new() };
        let (status, text) = request(
            self.port,
            &format!(
                "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                self.port,
                body.len()
            ),
        )?;
        let answer = text.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
        let mut answer: Value = serde_json::from_str(answer).with_context(|| format!("read {text:?}"))?;
        ensure!(status == 200, "{method} {path}: {}", answer["value"]["message"]);
        Ok(answer["value"].take())
    }

    fn of_session(&self, path: &str, body: &Value) -> Result<Value> {
        self.send("POST", &format!("/session/{}{path}", self.session), body)
    }

    /// Opens an address in the only window.
    pub fn open(&self, address: &str) -> Result<()> {
        self.of_session("/url", &json!({ "url": address })).map(|_| ())
    }

    /// Runs a script in the page; gives what it returns.
    pub fn run(&self, script: &str) -> Result<Value> {
        self.of_session("/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Presses keys one after the other, as a person would: characters, or the names of [`ENTER`] and its like.
    pub fn press(&self, keys: &[&str]) -> Result<()> {
        let presses: Vec<Value> = keys
            .iter()
            .flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({ "type": kind, "value": key })))
            .collect();
        let actions = json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": presses }] });
        self.of_session("/actions", &actions).map(|_| ())
    }

    /// One command of the Chrome DevTools Protocol.
    pub fn devtools(&self, command: &str, parameters: &Value) -> Result<Value> {
        self.of_session("/goog/cdp/execute", &json!({ "cmd": command, "params": parameters }))
    }

    /// Makes the page this wide and high.
    pub fn resize(&self, width: u32, height: u32) -> Result<()> {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", &size).map(|_| ())
    }

    /// Asks for dark or light colours, as the settings of a system do.
    pub fn prefer(&self, scheme: &str) -> Result<()> {
        let features = json!({ "features": [
            { "name": "prefers-color-scheme", "value": scheme },
            { "name": "prefers-reduced-motion", "value": "reduce" },
        ] });
        self.devtools("Emulation.setEmulatedMedia", &features).map(|_| ())
    }

    /// A picture of what is in sight, as a PNG.
    pub fn picture(&self) -> Result<Vec<u8>> {
        let answer =
            self.devtools("Page.captureScreenshot", &json!({ "format": "png", "optimizeForSpeed": false }))?;
        let text = answer["data"].as_str().context("a picture")?;
        Ok(base64::engine::general_purpose::STANDARD.decode(text)?)
    }

    /// What a screen reader finds in the page: role and name of everything that it tells, as the browser computes them.
    pub fn accessible_names(&self) -> Result<Vec<(String, String)>> {
        let tree = self.devtools("Accessibility.getFullAXTree", &json!({}))?;
        let nodes = tree["nodes"].as_array().context("a tree")?;
        let names = nodes.iter().filter(|node| node["ignored"] != true).map(|node| {
            let text = |field: &str| node[field]["value"].as_str().unwrap_or_default().to_owned();
            (text("role"), text("name"))
        });
        Ok(names.collect())
    }

    /// What the view shows, as text.
    pub fn text(&self) -> Result<String> {
        let text = self.run("return document.querySelector('main').innerText")?;
        Ok(text.as_str().unwrap_or_default().to_owned())
    }

    /// Goes to a view of the page.
    pub fn view(&self, hash: &str) -> Result<()> {
        self.run(&format!("location.hash = {}", json!(hash))).map(|_| ())
    }

    /// Waits until the view shows this.
    pub fn shows(&self, what: &str) -> Result<String> {
        let begun = Instant::now();
        loop {
            let text = self.text()?;
            if text.contains(what) {
                return Ok(text);
            }
            if begun.elapsed() > PATIENCE {
                bail!("{what:?} is not shown, but:\n{text}\n{:?}", self.complaints());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until a script returns true.
    pub fn holds(&self, script: &str) -> Result<()> {
        let begun = Instant::now();
        while self.run(script)? != Value::Bool(true) {
            if begun.elapsed() > PATIENCE {
                bail!("not so: {script}\n{}\n{:?}", self.text()?, self.complaints());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// What the browser complains of: errors of scripts, and what the content security policy refuses.
    pub fn complaints(&self) -> Result<Vec<String>> {
        let log = self.of_session("/se/log", &json!({ "type": "browser" }))?;
        let said = log.as_array().into_iter().flatten().filter(|line| line["level"] == "SEVERE");
        Ok(said.map(|line| line["message"].as_str().unwrap_or_default().to_owned()).collect())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty() {
            let _ = self.send("DELETE", &format!("/session/{}", self.session), &Value::Null);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// Sends a request as it stands to a port of this machine; gives the status and the whole answer.
pub fn request(port: u16, text: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    stream.write_all(text.as_bytes())?;
    let (mut answer, mut chunk) = (Vec::new(), [0; 8192]);
    // Not all servers close a connection when they are asked to.
    while !is_complete(&answer) {
        match stream.read(&mut chunk)? {
            0 => break,
            count => answer.extend_from_slice(&chunk[..count]),
        }
    }
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status =
        answer.split_whitespace().nth(1).and_then(|word| word.parse().ok()).context("there is no status")?;
    Ok((status, answer))
}

/// Whether an answer has as many bytes as its head says; one that does not say so is complete when the connection ends.
fn is_complete(answer: &[u8]) -> bool {
    let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { return false };
    let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
    let length =
        head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
    length.is_some_and(|length| answer.len() >= end + 4 + length)
}

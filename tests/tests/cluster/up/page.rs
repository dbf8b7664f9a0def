//! The web page in a real browser, on a machine with a healthy and a stuck volume, across a restart; and attacks on it.

use anyhow::{Context as _, Result, ensure};
use berth_e2e::browser::{Browser, request};
use berth_e2e::up::Machine;

use super::{claim, pod, together};

/// Would be an element if anybody parsed it.
const MARKUP: &str = "<img src=x onerror=document.title=1>";

/// The link that `berth status` prints.
fn link(machine: &Machine) -> Result<String> {
    let status = machine.says(&["status"])?;
    let line = status.lines().find(|line| line.trim_start().starts_with("page "));
    Ok(line
        .and_then(|line| line.split_whitespace().nth(1))
        .with_context(|| format!("no link in {status}"))?
        .to_owned())
}

#[test]
fn every_view_shows_what_is_there_also_after_a_restart() -> Result<()> {
    let mut machine = Machine::start()?;
    let browser = Browser::start(1280, 800)?;
    browser.open(&link(&machine)?)?;
    browser.shows("Nothing needs attention")?;
    browser.view("#/volumes")?;
    browser.shows("No volumes yet")?;
    browser.view("#/flow")?;
    browser.shows("Nothing moves now")?;

    let stuck = format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: stuck, annotations: {{note: {MARKUP:?}}}}}\nspec:\n  storageClassName: none-such\n  \
         accessModes: [ReadWriteOnce]\n  resources: {{requests: {{storage: 16Mi}}}}\n"
    );
    machine.apply(&together(&[claim("data"), pod("writer", "data", "sleep 1000000"), stuck]))?;
    machine.ready("writer")?;
    browser.view("#/flow?of=default/data&step=1")?;
    let flow = browser.shows("calls NodePublishVolume")?;
    ensure!(flow.contains("creates the claim") && flow.contains("starts the container"), "{flow}");
    browser.view("#/volume/default/data")?;
    let volume = browser.shows("First mount")?;
    for part in [
        "No problems found",
        "PUBLISHED",
        "NodeStageVolume",
        "ControllerPublishVolume",
        "Successfully assigned",
    ] {
        ensure!(volume.contains(part), "{part} is missing in {volume}");
    }
    // A call opens to its request.
    browser.run("document.querySelector('.calls button.tr').click()")?;
    browser.shows("Request")?;
    browser.view("#/volume/default/stuck")?;
    browser.shows("No such class")?;
    browser.view("#/overview")?;
    browser.shows("thing needs attention")?;
    browser.shows("default/stuck")?;
    browser.view("#/nodes")?;
    browser.shows("It would be made where its first pod goes")?;
    browser.view("#/leaks")?;
    browser.shows("Claims that no pod uses")?;

    browser.view("#/volumes")?;
    browser.shows("default/data")?;
    machine.kill()?;
    machine.restart()?;
    machine.apply(&claim("later"))?;
    browser.shows("default/later")?;
    browser.holds("return document.querySelector('#live').textContent === 'Live'")?;
    browser.holds("return document.querySelectorAll('img').length === 0")?;
    machine.finish()
}

#[test]
fn attacks_on_the_page_get_nothing() -> Result<()> {
    let machine = Machine::start()?;
    let link = link(&machine)?;
    let (host, token) =
        link.trim_start_matches("http://").split_once("/?token=").context("the link has a token")?;
    let port: u16 = host.rsplit(':').next().context("the link has a port")?.parse()?;
    let cookie = format!("Cookie: berth-{port}={token}\r\n");
    let get = |path: &str, host: &str, more: &str| {
        request(port, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n"))
    };
    for path in [
        "/",
        "/page.js",
        "/api/live",
        "/api/volume?id=default/data",
        "/api/flow?id=default/data",
        "/api/landing?class=a&size=1",
    ] {
        ensure!(get(path, host, "")?.0 == 401, "{path} without a token");
        ensure!(get(path, &format!("evil.example:{port}"), &cookie)?.0 == 421, "{path} by another name");
        ensure!(
            get(path, host, &format!("{cookie}Origin: http://evil.example\r\n"))?.0 == 403,
            "{path} from another page"
        );
    }
    let body = r#"{"action":"delete","id":"default/data","confirm":"data"}"#;
    let change = |more: &str| {
        let head = format!(
            "POST /api/act HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
        request(port, &format!("{head}{cookie}{more}\r\n{body}"))
    };
    for more in ["", "Origin: http://evil.example\r\n", "Origin: null\r\n"] {
        ensure!(change(more)?.0 == 403, "a change with {more:?}");
    }
    // Its own page may not either, as nobody allowed actions.
    let (status, said) = change(&format!("Origin: http://{host}\r\n"))?;
    ensure!(status == 403 && said.contains("read-only"), "{said}");
    machine.finish()
}

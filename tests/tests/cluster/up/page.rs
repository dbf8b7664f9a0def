//! The web page in a real browser, on a machine with healthy, stuck and full volumes and a thousand claims, across a restart; and
//! attacks on it.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::browser::{Browser, DOWN, ENTER, ESCAPE, request};
use berth_e2e::up::Machine;
use serde_json::{Value, json};

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

/// How many claims there are besides the one that is full.
const MANY: usize = 1000;

/// Creates claims that wait for a pod, all by one command.
fn create_many(machine: &Machine) -> Result<()> {
    let items: Vec<Value> = (0..MANY)
        .map(|number| {
            json!({
                "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": format!("many-{number:04}")},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "16Mi"}}},
            })
        })
        .collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
    machine.kubectl_with(&["create", "-f", "-"], &list.to_string()).map(drop)
}

/// How many milliseconds something on the page takes until it is painted.
fn painted_after(browser: &Browser, what: &str) -> Result<f64> {
    let frame = "await new Promise((done) => requestAnimationFrame(done));";
    let script = format!(
        "return (async () => {{ const begun = performance.now(); {what}; {frame} {frame} return performance.now() - begun; }})()"
    );
    browser.run(&script)?.as_f64().context("a number")
}

#[test]
fn a_thousand_claims_stay_smooth_and_a_full_volume_is_found_among_them() -> Result<()> {
    let mut machine = Machine::start()?;
    machine.apply(&together(&[claim("full"), pod("filler", "full", "sleep 1000000")]))?;
    machine.ready("filler")?;
    // It ends when there is no room left.
    machine.kubectl(&["exec", "filler", "--", "sh", "-c", "cat /dev/zero > /data/file; sync; true"])?;
    create_many(&machine)?;
    let browser = Browser::start(1280, 800)?;
    browser.open(&link(&machine)?)?;
    browser.shows("% full")?;
    browser.shows("default/full")?;
    browser.press(&["g", "v"])?;
    browser.shows("1,001")?;
    let rows = "document.querySelectorAll('.vt [role=rowgroup] > [role=row]')";
    let complete =
        format!("return document.querySelector('.vt').getAttribute('aria-rowcount') === '{}'", MANY + 2);
    browser.holds(&complete)?;
    browser.holds(&format!("const all = {rows}; return all.length > 10 && all.length < 60"))?;
    browser.holds(&format!("return {rows}[0].textContent.includes('full')"))?;
    // Loose, because this machine is busy: a page that drew all rows would take many times as long.
    for what in [
        "document.querySelector('.c-age button').click()",
        "document.querySelector('.c-claim button').click()",
        "scrollTo(0, document.body.scrollHeight)",
    ] {
        let took = painted_after(&browser, what)?;
        ensure!(took < 3000.0, "{what} took {took} ms");
    }
    browser.shows("many-0999")?;
    browser.holds(&format!("return {rows}.length < 60"))?;
    browser.press(&["/"])?;
    browser.press(&["0", "7", "7", "7"])?;
    browser.shows("1 of 1,001")?;
    browser.press(&[DOWN, ENTER])?;
    browser.shows("waits for the first pod")?;

    browser.view("#/volumes")?;
    browser.holds(&complete)?;
    machine.kill()?;
    browser.holds("return document.querySelector('#banner').textContent.includes('lost')")?;
    machine.restart()?;
    machine.delete("pvc/many-0000")?;
    browser.holds("return document.querySelector('#live').textContent === 'Live'")?;
    browser.shows("1,000")?;
    browser.holds(&format!(
        "return document.querySelector('.vt').getAttribute('aria-rowcount') === '{}'",
        MANY + 1
    ))?;
    machine.finish()
}

/// The views, with a claim and a volume that are there.
const VIEWS: [&str; 6] = ["#/overview", "#/volumes", "#/volume/default/data", "#/flow", "#/nodes", "#/leaks"];

/// Returns the innermost elements that reach beyond the window.
const TOO_WIDE: &str = "
    const beyond = (e) => e.getBoundingClientRect().right > innerWidth;
    const all = [...document.querySelectorAll('main *')].filter((e) => beyond(e) && ![...e.children].some(beyond));
    return all.map((e) => e.outerHTML.slice(0, 200));";

#[test]
fn every_view_can_be_read_aloud_used_by_keyboard_and_read_on_a_telephone() -> Result<()> {
    let machine = Machine::start()?;
    let stuck = claim("stuck").replace("spec:\n", "spec:\n  storageClassName: absent\n");
    machine.apply(&together(&[claim("data"), pod("writer", "data", "sleep 1000000"), stuck]))?;
    machine.ready("writer")?;
    let browser = Browser::start(1280, 800)?;
    browser.open(&link(&machine)?)?;
    browser.shows("thing needs attention")?;
    for width in [1280, 360] {
        browser.resize(width, 740)?;
        for view in VIEWS {
            browser.view(view)?;
            let title = match view {
                "#/overview" => "attention",
                "#/volume/default/data" => "First mount",
                "#/nodes" => "It would be made",
                "#/leaks" => "Claims that no pod uses",
                _ => "default/data",
            };
            if view == "#/flow" {
                browser.holds("return document.querySelector('.fsteps').children.length > 3")?;
            } else {
                browser.shows(title)?;
            }
            browser
                .holds("return document.documentElement.scrollWidth <= innerWidth")
                .with_context(|| format!("{view} is wider than {width} px: {:?}", browser.run(TOO_WIDE)))?;
            browser.holds("return document.querySelectorAll('h1').length === 1")?;
            let nameless: Vec<_> = browser
                .accessible_names()?
                .into_iter()
                .filter(|(role, name)| {
                    let used = [
                        "button",
                        "link",
                        "searchbox",
                        "textbox",
                        "combobox",
                        "spinbutton",
                        "slider",
                        "image",
                        "grid",
                        "table",
                        "navigation",
                        "tab",
                        "columnheader",
                        "heading",
                    ];
                    used.contains(&role.as_str()) && name.trim().is_empty()
                })
                .collect();
            ensure!(nameless.is_empty(), "{view} at {width} px has what nobody can read aloud: {nameless:?}");
        }
    }
    browser.resize(1280, 740)?;
    for (keys, shown) in
        [(["g", "o"], "attention"), (["g", "l"], "Claims that no pod uses"), (["g", "n"], "Where would")]
    {
        browser.press(&keys)?;
        browser.shows(shown)?;
        browser.holds("return document.activeElement.tagName === 'H1'")?;
    }
    browser.press(&["?"])?;
    browser.holds("return document.querySelector('dialog[open]') !== null")?;
    browser.press(&[ESCAPE])?;
    browser.holds("return document.querySelector('dialog[open]') === null")?;
    ensure!(browser.complaints()?.is_empty(), "{:?}", browser.complaints()?);
    machine.finish()
}

#[test]
fn what_viewers_may_change_is_changed_and_a_deletion_wants_the_name() -> Result<()> {
    let machine = Machine::start_with(&["--ui-allow-actions"])?;
    machine.apply(&together(&[claim("data"), pod("writer", "data", "sleep 1000000")]))?;
    machine.ready("writer")?;
    let browser = Browser::start(1280, 800)?;
    browser.open(&link(&machine)?)?;
    browser.view("#/volume/default/data")?;
    browser.shows("First mount")?;
    let press = |name: &str| {
        let find = format!(
            "[...document.querySelectorAll('button')].find((b) => b.textContent === {name:?} && b.checkVisibility())"
        );
        browser.holds(&format!("return !!{find} && !{find}.disabled"))?;
        browser.run(&format!("{find}.click()"))
    };
    let dialog = "document.querySelector('dialog[open] input')";
    let fill = |text: &str| {
        browser.holds(&format!("return !!{dialog}"))?;
        browser.run(&format!(
            "const field = {dialog}; field.value = {text:?}; field.dispatchEvent(new Event('input'))"
        ))
    };
    let confirm = || {
        let button = "document.querySelector('dialog[open] .primary, dialog[open] .danger')";
        browser.holds(&format!("return !{button}.disabled"))?;
        browser.run(&format!("{button}.click()"))?;
        browser.holds("return document.querySelector('dialog') === null")
    };
    press("Expand")?;
    fill("32Mi")?;
    confirm()?;
    machine.until("the claim asks for more", || {
        Ok((machine.get("pvc/data")?["spec"]["resources"]["requests"]["storage"] == "32Mi").then_some(()))
    })?;
    press("Snapshot")?;
    fill("then")?;
    confirm()?;
    machine
        .until("the snapshot is there", || Ok(machine.get("volumesnapshot/then").is_ok().then_some(())))?;
    press("Clone")?;
    fill("copy")?;
    confirm()?;
    machine.until("the copy is there", || Ok(machine.get("pvc/copy").is_ok().then_some(())))?;
    press("Delete")?;
    fill("dat")?;
    browser.holds("return document.querySelector('dialog[open] .danger').disabled")?;
    fill("data")?;
    confirm()?;
    machine.until("the claim is being deleted", || {
        Ok(machine.get("pvc/data")?["metadata"]["deletionTimestamp"].is_string().then_some(()))
    })?;
    machine.finish()
}

/// `berth replay`, killed when it is dropped.
struct Replay(Child);

impl Drop for Replay {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Puts the markup before every text of an object but those that other objects find it by.
fn marked(value: &mut Value) {
    match value {
        Value::String(text) => *text = format!("{text}{MARKUP}"),
        Value::Array(all) => all.iter_mut().for_each(marked),
        Value::Object(fields) => {
            for (name, value) in fields {
                let fixed = [
                    "kind",
                    "apiVersion",
                    "creationTimestamp",
                    "phase",
                    "type",
                    "status",
                    "storage",
                    "uid",
                    "firstTimestamp",
                    "lastTimestamp",
                    "volumeBindingMode",
                ];
                if !fixed.contains(&name.as_str()) {
                    marked(value);
                }
            }
        }
        _ => {}
    }
}

/// A recording of a claim that is bound, used and mounted, and of one that is stuck.
fn recording() -> Vec<(&'static str, Value)> {
    let time = "2026-01-01T00:00:00Z";
    let named = |name: &str| json!({"name": name, "namespace": "shop", "uid": name, "creationTimestamp": time, "labels": {"a": "b"}});
    let claim = |name: &str, phase: &str| {
        json!({"metadata": named(name), "status": {"phase": phase},
            "spec": {"storageClassName": "fast", "volumeName": "pv", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}})
    };
    vec![
        (
            "StorageClass",
            json!({"metadata": {"name": "fast"}, "provisioner": "a.csi", "volumeBindingMode": "Immediate"}),
        ),
        ("CSIDriver", json!({"metadata": {"name": "a.csi"}, "spec": {"attachRequired": true}})),
        (
            "Node",
            json!({"metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "z"}},
            "status": {"nodeInfo": {"kubeletVersion": "v1", "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "",
                "kubeProxyVersion": "", "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": ""},
                "conditions": [{"type": "Ready", "status": "True"}]}}),
        ),
        (
            "CSINode",
            json!({"metadata": {"name": "n1"}, "spec": {"drivers": [{"name": "a.csi", "nodeID": "n1", "topologyKeys": []}]}}),
        ),
        (
            "PersistentVolume",
            json!({"metadata": {"name": "pv", "uid": "pv", "creationTimestamp": time}, "status": {"phase": "Bound"},
            "spec": {"capacity": {"storage": "1Gi"}, "claimRef": {"namespace": "shop", "name": "data"}, "storageClassName": "fast",
                "accessModes": ["ReadWriteOnce"], "csi": {"driver": "a.csi", "volumeHandle": "handle"}}}),
        ),
        ("PersistentVolumeClaim", claim("data", "Bound")),
        ("PersistentVolumeClaim", claim("stuck", "Pending")),
        (
            "Pod",
            json!({"metadata": named("pod"), "status": {"phase": "Running"},
            "spec": {"nodeName": "n1", "containers": [], "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]}}),
        ),
        (
            "VolumeAttachment",
            json!({"metadata": {"name": "va", "uid": "va", "creationTimestamp": time}, "status": {"attached": true, "attachError": {"message": "no"}},
            "spec": {"attacher": "a.csi", "nodeName": "n1", "source": {"persistentVolumeName": "pv"}}}),
        ),
        (
            "Event",
            json!({"metadata": named("e"), "involvedObject": {"kind": "PersistentVolumeClaim", "name": "stuck", "namespace": "shop", "uid": "stuck"},
            "reason": "ProvisioningFailed", "message": "failed", "type": "Warning", "firstTimestamp": time, "lastTimestamp": time, "count": 2,
            "source": {"component": "who"}}),
        ),
    ]
}

#[test]
fn names_with_markup_in_every_field_stay_text() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut lines = String::new();
    for (kind, mut object) in recording() {
        marked(&mut object);
        let meta = &object["metadata"];
        let key = format!(
            "{}/{}",
            meta["namespace"].as_str().unwrap_or_default(),
            meta["name"].as_str().unwrap_or_default()
        );
        let line = json!({"time": "2026-01-01T00:10:00Z", "type": "ADDED", "kind": kind, "key": key, "object": object});
        lines += &line.to_string();
        lines.push('\n');
    }
    fs::write(directory.path().join("objects.jsonl"), lines)?;
    let call = json!({"time": "2026-01-01T00:05:00Z", "driver": MARKUP, "method": format!("/csi.v1.Controller/{MARKUP}"),
        "request": format!("\"pv{MARKUP}\" \"handle{MARKUP}\""), "response": MARKUP, "code": MARKUP, "error": MARKUP, "duration_us": 5});
    fs::write(directory.path().join("calls.jsonl"), format!("{call}\n"))?;
    let step = json!({"time": "2026-01-01T00:05:00Z", "component": format!("provisioner{MARKUP}"), "call": format!("CreateVolume{MARKUP}"),
        "state": MARKUP, "volume": format!("pv{MARKUP}"), "claim": format!("shop{MARKUP}/data{MARKUP}"), "node": MARKUP, "duration_us": 5, "error": MARKUP});
    fs::write(directory.path().join("timeline.jsonl"), format!("{step}\n"))?;

    let mut replay = berth_e2e::machine::command(berth_e2e::driver::binary()?);
    let mut replay = Replay(
        replay
            .arg("replay")
            .arg(directory.path())
            .arg("--listen=127.0.0.1:0")
            .stdout(Stdio::piped())
            .spawn()?,
    );
    let lines = BufReader::new(replay.0.stdout.take().context("its output is piped")?).lines();
    let link = lines.map_while(Result::ok).find(|line| line.starts_with("http://")).context("no link")?;
    let browser = Browser::start(1280, 800)?;
    browser.open(&link)?;
    let id = |name: &str| format!("shop{MARKUP}/{name}{MARKUP}");
    let encoded = |name: &str| {
        browser.run(&format!("return {:?}.split('/').map(encodeURIComponent).join('/')", id(name)))
    };
    browser.shows(&id("stuck"))?;
    let (data, stuck) = (encoded("data")?, encoded("stuck")?);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    for (view, shown) in [
        ("#/volumes".to_owned(), id("data")),
        (format!("#/volume/{}", text(&data)), "handle".to_owned()),
        (format!("#/volume/{}", text(&stuck)), "failed".to_owned()),
        (format!("#/flow?of={}", text(&data).replace('/', "%2F")), "Steps".to_owned()),
        ("#/nodes".to_owned(), format!("n1{MARKUP}")),
        ("#/leaks".to_owned(), "leak".to_owned()),
        ("#/overview".to_owned(), id("stuck")),
    ] {
        browser.view(&view)?;
        browser.shows(&shown).with_context(|| view.clone())?;
        browser.holds("return document.querySelectorAll('img').length === 0 && document.title !== '1'")?;
    }
    // Errors of the network are those of calls that this recording does not have.
    let complaints = browser.complaints()?;
    ensure!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}

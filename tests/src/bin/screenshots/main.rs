//! Makes the pictures of the documentation (`make screenshots`): the views of the page of a running `berth up` in a real browser, and `berth
//! top` in a real terminal.
//!
//! The machine has three nodes and a small shop on them: healthy volumes, one that is full, one whose class is missing, one whose
//! snapshot is missing, a snapshot with a clone, and a volume that was kept for nobody.

mod ansi;
mod png;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use berth_e2e::browser::Browser;
use berth_e2e::terminal::Terminal;
use berth_e2e::up::{Machine, NODE};

/// What all pictures together may take.
const ROOM: u64 = 600 << 10;

fn claim(name: &str, size: &str, more: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}, namespace: shop}}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
         resources: {{requests: {{storage: {size}}}}}\n{more}---\n"
    )
}

fn pod(name: &str, claim: &str, script: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop}}\nspec:\n  terminationGracePeriodSeconds: 2\n  \
         nodeSelector: {{kubernetes.io/hostname: {NODE}}}\n  containers:\n  - name: main\n    image: busybox\n    command: [sh, -c, {script:?}]\n    volumeMounts: [{{name: data, mountPath: /data}}]\n  \
         volumes: [{{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}]\n---\n"
    )
}

fn stateful_set(name: &str, replicas: u8, size: &str) -> String {
    format!(
        "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {{name: {name}, namespace: shop}}\nspec:\n  serviceName: {name}\n  replicas: {replicas}\n  \
         podManagementPolicy: Parallel\n  selector: {{matchLabels: {{app: {name}}}}}\n  template:\n    metadata: {{labels: {{app: {name}}}}}\n    spec:\n      \
         terminationGracePeriodSeconds: 2\n      containers:\n      - name: main\n        image: busybox\n        command: [sh, -c, \
         \"dd if=/dev/urandom of=/data/rows bs=1M count=9; sleep 1000000\"]\n        volumeMounts: [{{name: data, mountPath: /data}}]\n  \
         volumeClaimTemplates:\n  - metadata: {{name: data}}\n    spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: {size}}}}}}}\n---\n"
    )
}

const KEPT: &str = "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: pv-invoices-2025}\nspec:\n  capacity: {storage: 20Gi}\n  \
    accessModes: [ReadWriteOnce]\n  storageClassName: berth-local\n  persistentVolumeReclaimPolicy: Retain\n  \
    csi: {driver: local.berth.dev, volumeHandle: invoices-2025}\n  \
    claimRef: {apiVersion: v1, kind: PersistentVolumeClaim, namespace: shop, name: invoices, uid: 7d1a3c80-0000-4000-8000-000000000000}\n---\n";

const SNAPSHOT_GONE: &str =
    "  dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: orders-last-week}\n";

/// A shop, with what can go wrong in one.
fn shop() -> String {
    let growing = "for i in $(seq 1 200); do dd if=/dev/urandom of=/data/$i bs=256k count=1; sleep 1; done; sleep 1000000";
    let idle = "sleep 1000000";
    [
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n---\n".to_owned(),
        stateful_set("postgres", 3, "96Mi"),
        stateful_set("search", 4, "64Mi"),
        claim("orders", "128Mi", ""),
        pod("orders-api", "orders", growing),
        claim("uploads", "48Mi", ""),
        pod("uploads-web", "uploads", idle),
        claim("cache", "32Mi", ""),
        pod("cache-0", "cache", idle),
        claim("reports", "1Gi", "  storageClassName: fast-ssd\n"),
        pod("reports-job", "reports", idle),
        claim("analytics", "64Mi", SNAPSHOT_GONE),
        pod("analytics-job", "analytics", idle),
        claim("scratch", "64Mi", ""),
        KEPT.to_owned(),
    ]
    .concat()
}

const SNAPSHOT: &str = "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {name: orders-before-upgrade, namespace: shop}\nspec:\n  \
    source: {persistentVolumeClaimName: orders}\n";

fn prepare(machine: &Machine) -> Result<()> {
    machine.apply(&shop())?;
    for pod in ["orders-api", "uploads-web", "cache-0", "postgres-2", "search-3"] {
        machine.wait(&format!("-n shop pod/{pod}"), "condition=Ready")?;
    }
    machine.kubectl(&[
        "exec",
        "-n",
        "shop",
        "uploads-web",
        "--",
        "sh",
        "-c",
        "cat /dev/zero > /data/image; sync; true",
    ])?;
    machine.apply(SNAPSHOT)?;
    machine.wait("-n shop volumesnapshot/orders-before-upgrade", "jsonpath={.status.readyToUse}=true")?;
    let source = "  dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: orders-before-upgrade}\n";
    machine.apply(
        &(claim("orders-test", "128Mi", source) + &pod("orders-trial", "orders-test", "sleep 1000000")),
    )?;
    machine.wait("-n shop pod/orders-trial", "condition=Ready")
}

/// One picture: its name, the view, what it must show, and how large and in which colours it is.
struct Shot {
    name: &'static str,
    view: &'static str,
    shows: &'static str,
    size: (u32, u32),
    scheme: &'static str,
}

const WIDE: (u32, u32) = (1280, 800);

const SHOTS: &[Shot] = &[
    Shot { name: "overview", view: "#/overview", shows: "% full", size: WIDE, scheme: "light" },
    Shot { name: "volumes", view: "#/volumes", shows: "shop/data-postgres-0", size: WIDE, scheme: "light" },
    Shot {
        name: "volume",
        view: "#/volume/shop/orders",
        shows: "First mount",
        size: (1280, 1180),
        scheme: "light",
    },
    Shot {
        name: "stuck",
        view: "#/volume/shop/reports",
        shows: "fast-ssd",
        size: (1280, 760),
        scheme: "dark",
    },
    Shot {
        name: "flow",
        view: "#/flow?of=shop/orders&step=8",
        shows: "creates the claim",
        size: (1280, 800),
        scheme: "dark",
    },
    Shot {
        name: "nodes",
        view: "#/nodes?size=1",
        shows: "It would be made",
        size: (1280, 900),
        scheme: "light",
    },
    Shot { name: "leaks", view: "#/leaks", shows: "pv-invoices-2025", size: (1280, 620), scheme: "light" },
    Shot { name: "narrow", view: "#/overview", shows: "% full", size: (360, 740), scheme: "dark" },
];

fn link(machine: &Machine) -> Result<String> {
    let status = machine.says(&["status"])?;
    let link = status.lines().find_map(|line| line.trim_start().strip_prefix("page "));
    Ok(link.with_context(|| format!("no link in {status}"))?.trim().to_owned())
}

fn take(browser: &Browser, shot: &Shot, directory: &Path) -> Result<()> {
    browser.resize(shot.size.0, shot.size.1)?;
    browser.prefer(shot.scheme)?;
    browser.view(shot.view)?;
    browser.shows(shot.shows).with_context(|| format!("the picture {}", shot.name))?;
    // The heading has the focus after a change of the view.
    browser.run("document.activeElement?.blur(); scrollTo(0, 0)")?;
    browser.holds("return document.getAnimations().length === 0")?;
    std::fs::write(directory.join(format!("{}.png", shot.name)), png::with_palette(&browser.picture()?)?)?;
    Ok(())
}

/// The screen of a terminal when nothing is being drawn on it: two captures in a row are equal.
fn drawn(terminal: &Terminal) -> Result<String> {
    let mut before = terminal.coloured_screen()?;
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(100));
        let now = terminal.coloured_screen()?;
        if now == before {
            return Ok(now);
        }
        before = now;
    }
    bail!("the screen changes all the time:\n{before}")
}

fn main() -> Result<()> {
    let directory = std::env::args().nth(1).map(PathBuf::from).context("usage: screenshots DIRECTORY")?;
    std::fs::create_dir_all(&directory)?;
    let machine = Machine::start_with(&["--nodes=3"])?;
    let browser = Browser::start(WIDE.0, WIDE.1)?;
    // The page measures usage while it is open, so it is opened first.
    browser.open(&link(&machine)?)?;
    browser.shows("Nothing needs attention")?;
    prepare(&machine)?;
    browser.shows("uploads")?;
    browser.view("#/volume/shop/orders")?;
    browser.holds("return document.querySelector('.chart') !== null")?;
    // A chart wants some points, and usage is measured twice a minute.
    std::thread::sleep(Duration::from_secs(60));
    for shot in SHOTS {
        take(&browser, shot, &directory)?;
    }
    let mut top = machine.command(&["top"]);
    top.env("TERM", "screen-256color");
    let terminal = Terminal::start(&top, 128, 26)?;
    terminal.shows("% full")?;
    browser.resize(1072, 520)?;
    browser.open(&ansi::page(&drawn(&terminal)?))?;
    std::fs::write(directory.join("top.png"), png::with_palette(&browser.picture()?)?)?;
    drop(terminal);

    let mut whole = 0;
    for entry in std::fs::read_dir(&directory)? {
        let entry = entry?;
        let size = entry.metadata()?.len();
        println!("{:>8} {}", size, entry.path().display());
        whole += size;
    }
    ensure!(whole <= ROOM, "the pictures take {whole} bytes, and may take {ROOM}");
    machine.finish()
}

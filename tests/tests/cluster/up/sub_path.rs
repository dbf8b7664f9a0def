//! `subPath` while somebody exchanges directories for links that lead out of the volume.
//!
//! `BERTH_SUB_PATH_STARTS` says how many containers are started; `make test-sub-path` starts 10,000.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::up::Machine;
use rustix::fs::{CWD, RenameFlags};
use serde_json::{Value, json};

use super::until_empty;

/// How many containers are started.
const STARTS: &str = "BERTH_SUB_PATH_STARTS";
/// How many containers a pod has: one for each way in which the path is dangerous, several times.
const CONTAINERS: usize = 12;
const PODS: usize = 8;

/// Exchanges names for others in a loop until it is dropped.
struct Swapper {
    stop: Arc<AtomicBool>,
    swaps: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Swapper {
    fn start(pairs: Vec<(PathBuf, PathBuf)>) -> Self {
        let (stop, swaps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (told, count) = (stop.clone(), swaps.clone());
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                for (a, b) in &pairs {
                    // The two names change places at once: at no moment is one missing.
                    rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)
                        .expect("both names are there");
                    count.fetch_add(1, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        Self { stop, swaps, thread: Some(thread) }
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A volume in which `a`, `a/deep` and `file` are exchanged for links to the same names outside of it.
fn arena(dir: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
    let (volume, outside) = (dir.join("volume"), dir.join("outside"));
    for top in [&volume, &outside] {
        fs::create_dir_all(top.join("a/deep"))?;
        let word = if *top == volume { "inside\n" } else { "escaped\n" };
        for file in ["file", "a/file", "a/deep/file"] {
            fs::write(top.join(file), word)?;
        }
    }
    symlink(&outside, volume.join("absolute"))?;
    symlink(outside.join("a"), volume.join("a-link"))?;
    symlink("../../outside/a/deep", volume.join("a/deep-link"))?;
    symlink("../outside/file", volume.join("file-link"))?;
    Ok(vec![(volume.join("a"), volume.join("a-link")), (volume.join("file"), volume.join("file-link"))])
}

fn pod(name: &str, dir: &Path) -> Value {
    let sub_paths =
        ["a", "a/deep", "a/file", "file", "a/deep/file", "a/deep-link", "a/made/NAME", "absolute/a"];
    let container = |number: usize| {
        let path = sub_paths[number % sub_paths.len()].replace("NAME", &format!("{name}-{number}"));
        // What is found is a file, a directory with one, or a new directory.
        let script = "if test -d /sub; then cat /sub/file 2>/dev/null || echo new; else cat /sub; fi >> /results/$NAME";
        json!({
            "name": format!("c{number}"), "image": "busybox", "command": ["sh", "-c", script],
            "env": [{"name": "NAME", "value": format!("{name}-{number}")}],
            "volumeMounts": [
                {"name": "volume", "mountPath": "/sub", "subPath": path},
                {"name": "results", "mountPath": "/results"},
            ],
        })
    };
    let directory = |name: &str| json!({"name": name, "hostPath": {"path": dir.join(name)}});
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
            "containers": (0..CONTAINERS).map(container).collect::<Vec<_>>(),
            "volumes": [directory("volume"), directory("results")],
        },
    })
}

/// Whether every container of a pod was started, or refused.
fn is_tried(pod: &Value) -> bool {
    let statuses = pod["status"]["containerStatuses"].as_array();
    statuses.is_some_and(|statuses| {
        statuses.len() == CONTAINERS
            && statuses.iter().all(|status| {
                let waiting = status["state"]["waiting"]["reason"].as_str();
                waiting.is_none_or(|reason| !["ContainerCreating", "PodInitializing"].contains(&reason))
            })
    })
}

fn names_below(dir: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.append(&mut names_below(&entry.path())?);
        }
        found.insert(entry.path());
    }
    Ok(found)
}

#[test]
fn no_container_sees_what_is_outside_of_its_volume() -> Result<()> {
    let wanted: usize = std::env::var(STARTS).map_or(Ok(PODS * CONTAINERS * 2), |starts| starts.parse())?;
    let machine = Machine::start()?;
    let dir = tempfile::tempdir()?;
    let pairs = arena(dir.path())?;
    fs::create_dir(dir.path().join("results"))?;
    let outside = names_below(&dir.path().join("outside"))?;
    let swapper = Swapper::start(pairs);
    let (mut starts, mut read, mut round) = (0, 0, 0);
    while starts < wanted {
        round += 1;
        let names: Vec<String> = (0..PODS).map(|number| format!("p{round}-{number}")).collect();
        let pods: Vec<Value> = names.iter().map(|name| pod(name, dir.path())).collect();
        machine.apply(&json!({"apiVersion": "v1", "kind": "List", "items": pods}).to_string())?;
        machine.until("every container was tried", || {
            let pods = machine.all("pods")?;
            Ok((pods.len() == PODS && pods.iter().all(is_tried)).then_some(()))
        })?;
        let mut delete = vec!["delete", "pod", "--force", "--grace-period=0"];
        delete.extend(names.iter().map(String::as_str));
        machine.kubectl(&delete)?;
        machine.until("the pods are gone", || Ok(machine.all("pods")?.is_empty().then_some(())))?;
        starts += PODS * CONTAINERS;
        for entry in fs::read_dir(dir.path().join("results"))? {
            let path = entry?.path();
            let text = fs::read_to_string(&path)?;
            ensure!(!text.contains("escaped"), "{} read what is outside: {text:?}", path.display());
            read += usize::from(!text.is_empty());
            fs::remove_file(&path)?;
        }
        let now = names_below(&dir.path().join("outside"))?;
        ensure!(now == outside, "something was made outside: {:?}", now.difference(&outside));
    }
    let swaps = swapper.swaps.load(Ordering::Relaxed);
    eprintln!("{starts} starts, {read} of them found something, {swaps} exchanges, no escape");
    drop(swapper);
    // Without both outcomes the test would prove little.
    ensure!(read > starts / 10 && read < starts, "{read} of {starts} containers found something");
    ensure!(swaps > 100, "there were only {swaps} exchanges");
    until_empty(&machine).context("after all pods")?;
    machine.finish()
}

//! A directory for the containers of one test, all of which end with it, also when the test fails.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use berth_runtime::{
    ContainerId, ContainerSpec, Exit, Limits, Mount, PodSettings, Processes, Propagation, Runtime as _,
    Security,
};
use berth_runtime::{Found, find, remove_groups};

pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) struct Scratch {
    directory: tempfile::TempDir,
    next: AtomicU32,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        let scratch = Self { directory: tempfile::tempdir().unwrap(), next: AtomicU32::new(0) };
        fs::create_dir(scratch.path("logs")).unwrap();
        scratch
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.path("containers")
    }

    pub(crate) fn open(&self) -> Processes {
        Processes::open(&self.state(), &program()).unwrap()
    }

    /// A container of a new pod, with a usual environment.
    pub(crate) fn spec(&self, command: &[&str]) -> ContainerSpec {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        ContainerSpec {
            pod_uid: format!("uid-{number}"),
            pod_name: format!("pod-{number}"),
            namespace: "default".into(),
            name: "main".into(),
            attempt: 0,
            hostname: format!("pod-{number}"),
            command: command.iter().map(ToString::to_string).collect(),
            env: vec![("PATH".into(), "/usr/bin:/bin".into())],
            working_dir: None,
            user: None,
            group: None,
            groups: Vec::new(),
            user_namespace: None,
            security: Security::default(),
            limits: Limits::default(),
            pod_limits: Limits::default(),
            oom_score_adj: None,
            read_only_root: false,
            stdin: false,
            stdin_once: false,
            tty: false,
            mounts: Vec::new(),
            devices: Vec::new(),
            hidden: Vec::new(),
            log: self.path("logs").join(format!("{number}.log")),
            termination_message_path: Some("/dev/termination-log".into()),
            image: None,
            pod: PodSettings::default(),
            target: None,
        }
    }

    pub(crate) fn sh(&self, script: &str) -> ContainerSpec {
        self.spec(&["sh", "-c", script])
    }

    /// What a container printed and how it ended.
    pub(crate) async fn run(&self, runtime: &Processes, spec: ContainerSpec) -> (String, Exit) {
        let log = spec.log.clone();
        let id = runtime.start(spec).await.unwrap();
        let exit = exit(runtime, &id).await;
        (texts(&log).join("\n"), exit)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.state()).into_iter().flatten().flatten() {
            while let Ok(Found::Running(shim)) = find(&entry.path()) {
                let _ = shim.kill();
                shim.reap();
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        remove_groups(&self.state());
    }
}

pub(crate) async fn exit(runtime: &Processes, id: &ContainerId) -> Exit {
    tokio::time::timeout(SOON, runtime.exited(id)).await.expect("the container ends")
}

/// The texts of a log, without times, streams and tags.
pub(crate) fn texts(log: &Path) -> Vec<String> {
    let log = fs::read_to_string(log).unwrap_or_default();
    log.lines().map(|line| line.splitn(4, ' ').nth(3).unwrap().to_owned()).collect()
}

pub(crate) fn mount(source: &Path, target: &str, read_only: bool) -> Mount {
    Mount {
        recursive_read_only: false,
        source: source.to_owned(),
        sub_path: None,
        restricted: false,
        target: target.into(),
        read_only,
        propagation: Propagation::default(),
    }
}

/// The program of `examples/containers.rs`.
pub(crate) fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    tests.parent().unwrap().parent().unwrap().join("examples/containers")
}

/// Processes of this machine whose command line has `part`.
pub(crate) fn processes(part: &str) -> Vec<String> {
    let listed = Command::new("ps").args(["-eo", "pid,stat,args"]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    listed.lines().filter(|line| line.contains(part) && !line.contains("ps -eo")).map(str::to_owned).collect()
}

/// Waits, within limits, for what happens soon after something that could be waited for.
pub(crate) async fn until(what: &str, happened: impl FnMut() -> bool) {
    until_within(SOON, what, happened).await;
}

/// The same for what takes longer.
pub(crate) async fn until_within(patience: Duration, what: &str, mut happened: impl FnMut() -> bool) {
    let wait = async {
        while !happened() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(patience, wait).await.unwrap_or_else(|_| panic!("{what}"));
}

//! A driver between a server that gets into trouble and one that does not, and what both have beside its volumes.

use std::{
    cell::Cell,
    fs,
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{machine, program::Program};
use futures_util::future::join_all;
use tonic::{Code, Status};

use crate::{
    calls::{Call, Caller, Kind, Outcome, Share},
    world::{Part, Server},
};

/// How long each call may take while there is trouble, and one that would rather know.
pub(crate) const DEADLINE: Duration = Duration::from_secs(7);
const LONG_DEADLINE: Duration = Duration::from_secs(16);
/// A call of the server without trouble, on a machine with much to do.
const FAST: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(40);
const PAUSE: Duration = Duration::from_millis(20);
const UNREAD: usize = 1 << 20;

/// What is called at once while there is trouble. Nobody waits for another's volume.
pub(crate) const STORM: [Call; 11] = [
    (Kind::Create, "new-1"),
    (Kind::Create, "new-2"),
    (Kind::Create, "new-3"),
    (Kind::Publish, "idle"),
    (Kind::Stats, "used"),
    (Kind::Health, "used"),
    (Kind::Expand, "grown"),
    (Kind::Snapshot, "kept"),
    (Kind::Delete, "doomed"),
    (Kind::Unpublish, "leaving"),
    (Kind::Create, PATIENT),
];
/// Waits longer than its server is silent.
pub(crate) const PATIENT: &str = "patient";
const BEFORE: [&str; 6] = ["used", "idle", "grown", "kept", "doomed", "leaving"];

/// A driver and its servers; all gone when the test is, however it ends.
pub(crate) struct Scene {
    /// Before the servers: it ends with what it mounts, and only then is everything unmounted.
    driver: Program,
    pub(crate) bad: Server,
    pub(crate) share: Share,
    pub(crate) caller: Caller,
    _good: Server,
    well: Share,
    before: Footprint,
    beside: Vec<ObservedFile>,
}

/// What a process takes of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Footprint {
    threads: usize,
    files: usize,
    children: usize,
}

/// A file or directory that is nobody's volume.
#[derive(Debug, PartialEq, Eq)]
struct ObservedFile {
    path: PathBuf,
    owner: (u32, u32, u32),
    modified: (i64, i64),
    content: Vec<u8>,
}

/// A process as a pod has it, that reads a file; killed if nobody waits for it any more.
pub(crate) struct Reader(Child);

impl Scene {
    /// Makes volumes on both servers, publishes some, and remembers how everything is.
    pub(crate) async fn set(bad: Server, port: Option<u16>) -> Result<Self> {
        let good = Server::start("4.1")?;
        let driver = bad.drive(Part::Node).await?;
        let caller = Caller::new(&bad.endpoint(Part::Node))?;
        let (share, well) = (Share::of(&bad, "127.0.0.1", port), Share::of(&good, "127.0.0.2", None));
        for (name, text) in [("export/somebody/file", "precious"), ("outside/file", "precious, too")] {
            let path = bad.dir().join(name);
            fs::create_dir_all(path.parent().context("a file lies somewhere")?)?;
            fs::write(path, text)?;
        }
        std::os::unix::fs::symlink(bad.dir().join("outside"), bad.export().join("somebody/link"))?;
        for name in BEFORE {
            caller.until_done(&share, (Kind::Create, name)).await;
            let dir = bad.export().join(name).join("dir");
            fs::create_dir(&dir)?;
            fs::write(dir.join("file"), name)?;
        }
        fs::write(bad.export().join("used/unread"), vec![b'u'; UNREAD])?;
        for name in ["used", "leaving"] {
            caller.until_done(&share, (Kind::Publish, name)).await;
        }
        let beside = seen_beside(&bad)?;
        let before = Footprint::of(id(&driver))?;
        let scene = Self { bad, share, caller, _good: good, well, driver, before, beside };
        scene.one_good_round().await;
        let before = Footprint::of(id(&scene.driver))?;
        Ok(Self { before, ..scene })
    }

    /// Has a pod read what nobody has read yet.
    pub(crate) fn read(&self) -> Result<Reader> {
        let mut command = machine::command("cat");
        command.arg(self.share.target("used").join("unread")).stdin(Stdio::null()).stdout(Stdio::piped());
        Ok(Reader(command.spawn()?))
    }

    /// Waits until the server answers whoever asks. That is not the driver under test, which has to find out by itself.
    pub(crate) async fn until_answered(&self) -> Result<()> {
        let other = self.bad.drive(Part::Controller).await?;
        let caller = Caller::new(&self.bad.endpoint(Part::Controller))?;
        caller.until_done(&self.share, (Kind::Get, "used")).await;
        other.stop().await
    }

    /// Makes calls all at once, while the other server's go on as if nothing were.
    pub(crate) async fn storm(&self, calls: &[Call]) -> Vec<Outcome> {
        let calls = calls.iter().map(|&call| {
            // Health has seconds of its own for a server that says nothing.
            let is_long = matches!(call, (Kind::Health, _) | (_, PATIENT));
            self.caller.make(&self.share, call, if is_long { LONG_DEADLINE } else { DEADLINE })
        });
        let is_over = Cell::new(false);
        let calls = async {
            let outcomes = join_all(calls).await;
            is_over.set(true);
            outcomes
        };
        let good = async {
            let mut steps = Vec::new();
            while !is_over.get() {
                steps.extend(self.one_good_round().await);
            }
            steps
        };
        let (outcomes, steps) = tokio::join!(calls, good);
        check_pace(&steps);
        for outcome in &outcomes {
            eprintln!("{:?} {:?} {:?}", outcome.call, outcome.took, outcome.result);
            if let Err(status) = &outcome.result {
                self.check_words(outcome.call, status);
            }
        }
        outcomes
    }

    /// A whole life of a volume of the other server, step by step.
    async fn one_good_round(&self) -> Vec<Outcome> {
        let mut steps = Vec::new();
        for kind in [Kind::Create, Kind::Publish, Kind::Stats, Kind::Unpublish, Kind::Delete] {
            let outcome = self.caller.make(&self.well, (kind, "well"), DEADLINE).await;
            assert!(outcome.result.is_ok(), "{outcome:?}");
            steps.push(outcome);
        }
        steps
    }

    /// A sentence about a server names it, and says what to do.
    fn check_words(&self, call: Call, status: &Status) {
        let server = &self.share.parameters["server"];
        match status.code() {
            Code::DeadlineExceeded | Code::Aborted => {}
            _ => {
                assert!(status.message().contains(server.as_str()), "{call:?} names no server: {status:?}");
                let advice =
                    ["see whether", "make room", "option `rw`", "repeat the call", "publish it again"];
                let has_advice = advice.iter().any(|words| status.message().contains(words));
                assert!(has_advice, "{call:?} says nothing to do: {status:?}");
            }
        }
    }

    /// Everything that was called comes right when it is repeated, and in the end nothing is left of any of it.
    pub(crate) async fn converges(self, reader: Reader) -> Result<()> {
        let begun = Instant::now();
        for call in STORM.into_iter().filter(|(kind, _)| !matches!(kind, Kind::Stats | Kind::Health)) {
            self.caller.until_done(&self.share, call).await;
        }
        for name in ["new-1", "new-2", "new-3", PATIENT] {
            ensure!(self.bad.export().join(name).is_dir(), "{name} is there");
        }
        ensure!(!self.bad.export().join("doomed").exists(), "a deleted volume is gone");
        self.caller.until_done(&self.share, (Kind::Publish, "used")).await;
        for name in ["used", "idle"] {
            let text = fs::read_to_string(self.share.target(name).join("dir/file"))?;
            ensure!(text == name, "{name} has what it had");
        }
        ensure!(reader.text()? == vec![b'u'; UNREAD], "what was being read is read");
        self.caller.until_done(&self.share, (Kind::Stats, "used")).await;
        let health = self.caller.make(&self.share, (Kind::Health, "used"), DEADLINE).await;
        ensure!(health.result.as_ref().is_ok_and(Vec::is_empty), "it is well: {:?}", health.result);
        eprintln!("all came right within {:?}", begun.elapsed());
        self.everything_goes().await
    }

    async fn everything_goes(self) -> Result<()> {
        for name in ["used", "idle"] {
            self.caller.until_done(&self.share, (Kind::Unpublish, name)).await;
        }
        self.caller.until_done(&self.share, (Kind::DeleteSnapshot, "kept")).await;
        let made = STORM.into_iter().filter(|(kind, _)| *kind == Kind::Create).map(|(_, name)| name);
        for name in BEFORE.into_iter().chain(made) {
            self.caller.until_done(&self.share, (Kind::Delete, name)).await;
        }
        self.bad.nothing_left().await?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            // Whoever comes next to a share removes what is left there.
            let _ = self.caller.make(&self.share, (Kind::Get, "nobody"), DEADLINE).await;
            let (left, now) = (left_on(&self.bad.export())?, Footprint::of(id(&self.driver))?);
            let stuck = stuck(id(&self.driver))?;
            if left.is_empty() && now.within(self.before) && stuck.is_empty() {
                break;
            }
            ensure!(
                Instant::now() < deadline,
                "left on the share: {left:?}; the driver takes {now:?} instead of {:?}; stuck: {stuck:?}",
                self.before
            );
            tokio::time::sleep(PAUSE).await;
        }
        ensure!(seen_beside(&self.bad)? == self.beside, "what is nobody's volume is as it was");
        self.driver.stop().await
    }
}

/// Checks that nobody waits for another's server. The machine itself may stand still for once; whoever waited would do so in
/// every round, and while a server is silent there is time for more than one.
fn check_pace(steps: &[Outcome]) {
    let slow: Vec<&Outcome> = steps.iter().filter(|step| step.took >= FAST).collect();
    eprintln!("{} steps went well meanwhile, {} of them slowly", steps.len(), slow.len());
    assert!(slow.len() <= 1, "these waited for another's: {slow:?}");
}

impl Footprint {
    fn of(pid: u32) -> Result<Self> {
        let count = |path: String| fs::read_dir(path).map(Iterator::count);
        Ok(Self {
            threads: count(format!("/proc/{pid}/task"))?,
            files: count(format!("/proc/{pid}/fd"))?,
            children: children(pid)?.len(),
        })
    }

    fn within(self, limit: Self) -> bool {
        self.threads <= limit.threads && self.files <= limit.files && self.children <= limit.children
    }
}

impl Reader {
    /// What it has read, if it ends.
    fn text(mut self) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        self.0.stdout.take().context("its output is a pipe")?.read_to_end(&mut text)?;
        Ok(text)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn id(driver: &Program) -> u32 {
    driver.pid().as_raw_nonzero().get().unsigned_abs()
}

fn children(pid: u32) -> Result<Vec<u32>> {
    let mut all = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let list = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        all.extend(list.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
    }
    Ok(all)
}

/// Threads of a process and of its children that wait where no signal reaches them.
fn stuck(pid: u32) -> Result<Vec<String>> {
    let mut stuck = Vec::new();
    for process in children(pid)?.into_iter().chain([pid]) {
        let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else { continue };
        for task in tasks.flatten() {
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            if status.lines().any(|line| line.starts_with("State:\tD")) {
                stuck.push(status);
            }
        }
    }
    Ok(stuck)
}

/// What is on a share and nobody's: neither what was there before, nor the driver's own directories.
fn left_on(export: &Path) -> Result<Vec<String>> {
    let own = [
        ".berth/",
        ".berth/volumes/",
        ".berth/snapshots/",
        ".berth/archived/",
        ".berth/incoming/",
        ".berth/trash/",
    ];
    let mut left = machine::listing(export)?;
    left.retain(|line| {
        !own.contains(&line.as_str()) && !line.starts_with("somebody") && line != "lost+found/"
    });
    Ok(left)
}

fn seen_beside(server: &Server) -> Result<Vec<ObservedFile>> {
    let mut seen = Vec::new();
    let mut pending = vec![server.export().join("somebody"), server.dir().join("outside")];
    while let Some(path) = pending.pop() {
        let found = fs::symlink_metadata(&path)?;
        let content = if found.is_dir() {
            let mut names: Vec<_> =
                fs::read_dir(&path)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
            names.sort();
            pending.extend(names);
            Vec::new()
        } else if found.is_symlink() {
            fs::read_link(&path)?.into_os_string().into_encoded_bytes()
        } else {
            fs::read(&path)?
        };
        let (owner, modified) =
            ((found.mode(), found.uid(), found.gid()), (found.mtime(), found.mtime_nsec()));
        seen.push(ObservedFile { path, owner, modified, content });
    }
    Ok(seen)
}

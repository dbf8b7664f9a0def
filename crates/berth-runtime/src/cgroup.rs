//! Control groups: what containers may take of processors, memory and process numbers, and what they took.
//!
//! Each container has a group of its own in a group of its pod, and all pods of a runtime are in one group, which is named
//! after the runtime's directory: `berth-<hash>/pod<uid>/<container>_<attempt>`. Version 2 of control groups has one
//! hierarchy; in version 1 each controller may have one of its own, and the groups are made in each of them.
//!
//! The groups are made before a container is started and removed when it has ended, be it by the next runtime of the
//! directory ([`Cgroups::retain`]). The command of a container is in the group, its process 1 is not: when everything in a
//! group is killed for want of memory, somebody has to be left to record that.

use std::{
    fmt,
    fs::{self, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::{FileExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use berth_host::{Doing as _, Result, mount};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::runtime::ContainerId;

/// In which a group that has used up its processor time waits for more, in microseconds.
const PERIOD: u64 = 100_000;
/// The least time in a period that the kernel takes as a limit, in microseconds.
const LEAST_QUOTA: u64 = 1000;
/// The weight of one processor.
const SHARES_OF_A_PROCESSOR: u64 = 1024;
/// The weights that version 1 takes.
const SHARES: std::ops::RangeInclusive<u64> = 2..=262_144;
/// How long processes that were killed may take to leave their group.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// What a container, or all containers of a pod together, may take of the machine; `None` is without limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// The weight against others when there is not enough processor time for all: 1024 for each processor that was requested.
    pub cpu_shares: Option<u64>,
    /// Thousandths of a processor.
    pub cpu_millis: Option<u64>,
    /// Bytes of memory, of which none is swapped out.
    pub memory: Option<u64>,
    /// The number of processes and threads.
    pub pids: Option<u64>,
}

/// What a container has taken of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time since its start, in nanoseconds.
    pub cpu: u64,
    /// Bytes of memory, with the files that the kernel keeps for it.
    pub memory: u64,
    /// Bytes of memory without files that were not used lately: what cannot be had back without harm.
    pub working_set: u64,
    /// Bytes of memory that are no files.
    pub anonymous: u64,
    /// The number of processes and threads.
    pub pids: u64,
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.cpu += other.cpu;
        self.memory += other.memory;
        self.working_set += other.working_set;
        self.anonymous += other.anonymous;
        self.pids += other.pids;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Controller {
    Cpu,
    Accounting,
    Memory,
    Pids,
}

impl Controller {
    const ALL: [Self; 4] = [Self::Cpu, Self::Accounting, Self::Memory, Self::Pids];

    /// The name of the controller in version 1; version 2 counts processor time without being asked to.
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Accounting => "cpuacct",
            Self::Memory => "memory",
            Self::Pids => "pids",
        }
    }
}

/// Where groups are made on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Machine {
    /// Each hierarchy with its controllers.
    V1(Vec<(PathBuf, Vec<Controller>)>),
    V2(PathBuf),
}

/// The control groups of one runtime.
pub(crate) struct Cgroups {
    machine: Machine,
    /// The group of all pods, below each hierarchy's root.
    name: String,
    /// Held while groups are made or removed: the group of a pod goes with the last container in it.
    changing: Mutex<()>,
}

impl fmt::Debug for Cgroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cgroups").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What a process needs to become a member of a group.
pub(crate) struct Membership {
    unified: bool,
    /// Version 1: where each hierarchy takes new members. Version 2: the group itself.
    fds: Vec<OwnedFd>,
}

impl Membership {
    /// Of descriptors that came from [`Membership::fds`].
    pub(crate) fn new(unified: bool, fds: Vec<OwnedFd>) -> Self {
        Self { unified, fds }
    }

    /// Whether the descriptor is a group of version 2.
    pub(crate) fn is_unified(&self) -> bool {
        self.unified
    }

    /// To be passed to another process.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.fds.iter().map(OwnedFd::as_fd)
    }

    /// The group that a process can be made in, which is all that version 2 needs.
    pub(crate) fn to_clone_into(&self) -> Option<BorrowedFd<'_>> {
        self.fds.first().filter(|_| self.unified).map(OwnedFd::as_fd)
    }

    /// Makes this process, which must have one thread, a member of the groups of version 1.
    ///
    /// To move a thread that is its own process costs microseconds; to move a process by `cgroup.procs`, which may have
    /// several, takes a lock that all forks of the machine wait for.
    pub(crate) fn join(&self) -> rustix::io::Result<()> {
        if !self.unified {
            for group in &self.fds {
                rustix::io::write(group, b"0")?;
            }
        }
        Ok(())
    }
}

/// Groups for a container that is about to be started.
pub(crate) struct Prepared {
    pub(crate) membership: Membership,
    /// Says how often something in the group was killed for want of memory.
    pub(crate) events: OwnedFd,
}

/// Every control group that there is for the runtime of a directory, the groups of version 1 once for each hierarchy.
pub fn groups_of(directory: &Path) -> Vec<PathBuf> {
    let Ok(machine) = mount::mounts().map_err(|error| error.sentence()).and_then(|all| Machine::find(&all))
    else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> =
        machine.roots().map(|root| root.join(group_name(directory))).filter(|path| path.exists()).collect();
    let mut next = 0;
    while let Some(group) = found.get(next).cloned() {
        found.extend(children(&group).into_iter().map(|child| group.join(child)));
        next += 1;
    }
    found
}

/// Removes the control groups that the runtime of a directory has left, and kills what is still in them.
pub fn remove_groups(directory: &Path) {
    if let Ok(groups) = Cgroups::open(directory) {
        groups.retain(&[]);
    }
}

/// Whether something in a group was killed for want of memory.
pub(crate) fn was_out_of_memory(events: &OwnedFd) -> bool {
    let mut text = [0; 512];
    let Ok(copy) = events.try_clone() else { return false };
    let read = fs::File::from(copy).read_at(&mut text, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&text[..read]);
    figure(&text, "oom_kill").is_some_and(|count| count > 0)
}

/// The value of a line `<name> <value>`.
fn figure(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    line.trim().parse().ok()
}

impl Cgroups {
    /// The groups of the runtime in `directory`; an error says in one sentence why this machine has none for it.
    pub(crate) fn open(directory: &Path) -> std::result::Result<Self, String> {
        let mounts = mount::mounts().map_err(|error| error.sentence())?;
        let machine = Machine::find(&mounts)?;
        let groups = Self { machine, name: group_name(directory), changing: Mutex::default() };
        groups.make_root().map_err(|error| error.sentence())?;
        Ok(groups)
    }

    /// Makes the group of all pods, with the weight of the whole machine, as the kubelet gives it to its own.
    fn make_root(&self) -> Result<()> {
        let processors = thread::available_parallelism().map_or(1, usize::from) as u64;
        let shares = Limits { cpu_shares: Some(processors * SHARES_OF_A_PROCESSOR), ..Limits::default() };
        if let Machine::V2(root) = &self.machine {
            delegate(root)?;
        }
        self.make(Path::new(""), &shares)?;
        if let Machine::V2(root) = &self.machine {
            delegate(&root.join(&self.name))?;
        }
        Ok(())
    }

    /// Makes the groups of a container and of its pod, with their limits.
    pub(crate) fn prepare(&self, id: &ContainerId, pod: &Limits, own: &Limits) -> Result<Prepared> {
        let _changing = self.changing.lock();
        let pod_group = PathBuf::from(pod_group(&id.pod_uid));
        self.make(&pod_group, pod)?;
        if let Machine::V2(root) = &self.machine {
            delegate(&root.join(&self.name).join(&pod_group))?;
        }
        let group = own_group(id);
        self.make(&group, own)?;
        let (memory, events) = match &self.machine {
            Machine::V1(_) => (self.path(Controller::Memory, &group), "memory.oom_control"),
            Machine::V2(root) => {
                let path = root.join(&self.name).join(&group);
                // As the kubelet has it: what is left of a container would hardly work without what was killed.
                write(&path.join("memory.oom.group"), "1")?;
                (Some(path), "memory.events")
            }
        };
        let events = memory.unwrap_or_default().join(events);
        let events = fs::File::open(&events).doing("open", &events)?;
        Ok(Prepared { membership: self.membership(id)?, events: events.into() })
    }

    /// Makes the group of a pod whose containers another runtime puts into groups below it; gives its path below the root of
    /// each hierarchy.
    pub(crate) fn prepare_pod(&self, uid: &str, limits: &Limits) -> Result<PathBuf> {
        let _changing = self.changing.lock();
        let group = PathBuf::from(pod_group(uid));
        self.make(&group, limits)?;
        if let Machine::V2(root) = &self.machine {
            delegate(&root.join(&self.name).join(&group))?;
        }
        Ok(Path::new("/").join(&self.name).join(group))
    }

    /// Removes the group of a pod that another runtime has emptied. That made it in every hierarchy there is.
    pub(crate) fn remove_pod(&self, uid: &str) {
        let _changing = self.changing.lock();
        let mounts = mount::mounts().unwrap_or_default();
        for root in mounts.iter().filter(|mount| mount.fs_type.starts_with("cgroup")) {
            let group = root.target.join(&self.name).join(pod_group(uid));
            if group.exists() {
                remove_when_empty(&group);
            }
        }
    }

    /// What one more process needs to join the group of a container.
    pub(crate) fn membership(&self, id: &ContainerId) -> Result<Membership> {
        let group = own_group(id);
        let (unified, paths) = match &self.machine {
            Machine::V1(all) => {
                let tasks = all.iter().map(|(root, _)| root.join(&self.name).join(&group).join("tasks"));
                (false, tasks.collect::<Vec<_>>())
            }
            Machine::V2(root) => (true, vec![root.join(&self.name).join(&group)]),
        };
        let open = |path: &PathBuf| {
            let mut options = OpenOptions::new();
            options.custom_flags(libc::O_CLOEXEC);
            let options = if unified { options.read(true) } else { options.write(true) };
            options.open(path).map(OwnedFd::from).doing("open", path)
        };
        Ok(Membership::new(unified, paths.iter().map(open).collect::<Result<_>>()?))
    }

    /// What a container has taken so far; `None` when it has no group any more.
    pub(crate) fn usage(&self, id: &ContainerId) -> Option<Usage> {
        let group = own_group(id);
        let read = |controller, file: &str| {
            let mut text = String::new();
            let mut file = fs::File::open(self.path(controller, &group)?.join(file)).ok()?;
            file.read_to_string(&mut text).ok().map(|_| text)
        };
        let number = |controller, file: &str| read(controller, file)?.trim().parse::<u64>().ok();
        let stat = read(Controller::Memory, "memory.stat")?;
        let (cpu, memory, inactive, anonymous) = match &self.machine {
            Machine::V1(_) => (
                number(Controller::Accounting, "cpuacct.usage"),
                number(Controller::Memory, "memory.usage_in_bytes")?,
                figure(&stat, "total_inactive_file"),
                figure(&stat, "total_rss"),
            ),
            Machine::V2(_) => (
                read(Controller::Cpu, "cpu.stat").and_then(|stat| Some(figure(&stat, "usage_usec")? * 1000)),
                number(Controller::Memory, "memory.current")?,
                figure(&stat, "inactive_file"),
                figure(&stat, "anon"),
            ),
        };
        Some(Usage {
            cpu: cpu.unwrap_or(0),
            memory,
            working_set: memory.saturating_sub(inactive.unwrap_or(0)),
            anonymous: anonymous.unwrap_or(0),
            pids: number(Controller::Pids, "pids.current").unwrap_or(0),
        })
    }

    /// Removes the group of a container that has ended, and that of its pod if it was the last.
    pub(crate) fn remove(&self, id: &ContainerId) {
        let _changing = self.changing.lock();
        for root in self.machine.roots() {
            let group = root.join(&self.name).join(own_group(id));
            remove_when_empty(&group);
            // Refused as long as there are others in it.
            if let Some(pod) = group.parent() {
                let _ = fs::remove_dir(pod);
            }
        }
    }

    /// Removes every group but those of `known` containers: what was left by a kill. What is still in a group is killed.
    pub(crate) fn retain(&self, known: &[ContainerId]) {
        let _changing = self.changing.lock();
        let known: Vec<PathBuf> = known.iter().map(own_group).collect();
        for root in self.machine.roots() {
            let all = root.join(&self.name);
            for pod in children(&all) {
                for group in children(&all.join(&pod)) {
                    if !known.contains(&Path::new(&pod).join(&group)) {
                        let group = all.join(&pod).join(&group);
                        kill_members(&group);
                        remove_when_empty(&group);
                    }
                }
                let _ = fs::remove_dir(all.join(&pod));
            }
        }
    }

    /// Makes a group where it is missing, and gives it its limits.
    fn make(&self, group: &Path, limits: &Limits) -> Result<()> {
        for root in self.machine.roots() {
            let path = root.join(&self.name).join(group);
            match fs::create_dir(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(error).doing("make the control group", &path);
                }
                _ => {}
            }
        }
        self.limit(group, limits)
    }

    fn limit(&self, group: &Path, limits: &Limits) -> Result<()> {
        let file = |controller, file: &str| self.path(controller, group).map(|path| path.join(file));
        let set = |controller: Controller, name: &str, value: String| match file(controller, name) {
            Some(path) => write(&path, &value),
            None => Err(io::Error::other(format!("there is no control group of {}", controller.name())))
                .doing("limit", name),
        };
        let shares = limits.cpu_shares.map(|shares| shares.clamp(*SHARES.start(), *SHARES.end()));
        let quota = limits.cpu_millis.map(|millis| (millis * PERIOD / 1000).max(LEAST_QUOTA));
        let (memory, pids) = (limits.memory, limits.pids);
        match &self.machine {
            Machine::V1(_) => {
                if let Some(shares) = shares {
                    set(Controller::Cpu, "cpu.shares", shares.to_string())?;
                }
                if let Some(quota) = quota {
                    set(Controller::Cpu, "cpu.cfs_period_us", PERIOD.to_string())?;
                    set(Controller::Cpu, "cpu.cfs_quota_us", quota.to_string())?;
                }
                if let Some(memory) = memory {
                    set(Controller::Memory, "memory.limit_in_bytes", memory.to_string())?;
                    // Not there where the kernel does not count swapped memory.
                    let with_swap = file(Controller::Memory, "memory.memsw.limit_in_bytes");
                    if let Some(path) = with_swap.filter(|path| path.exists()) {
                        write(&path, &memory.to_string())?;
                    }
                }
            }
            Machine::V2(_) => {
                if let Some(shares) = shares {
                    set(Controller::Cpu, "cpu.weight", weight(shares).to_string())?;
                }
                if let Some(quota) = quota {
                    set(Controller::Cpu, "cpu.max", format!("{quota} {PERIOD}"))?;
                }
                if let Some(memory) = memory {
                    set(Controller::Memory, "memory.max", memory.to_string())?;
                    let swap = file(Controller::Memory, "memory.swap.max");
                    if let Some(path) = swap.filter(|path| path.exists()) {
                        write(&path, "0")?;
                    }
                }
            }
        }
        match pids {
            Some(pids) => set(Controller::Pids, "pids.max", pids.to_string()),
            None => Ok(()),
        }
    }

    /// A group in the hierarchy of a controller.
    fn path(&self, controller: Controller, group: &Path) -> Option<PathBuf> {
        let root = match &self.machine {
            Machine::V1(all) => &all.iter().find(|(_, controllers)| controllers.contains(&controller))?.0,
            Machine::V2(root) => root,
        };
        Some(root.join(&self.name).join(group))
    }
}

impl Drop for Cgroups {
    /// The group of all pods goes with the last of them.
    fn drop(&mut self) {
        let mounts = mount::mounts().unwrap_or_default();
        for root in mounts.iter().filter(|mount| mount.fs_type.starts_with("cgroup")) {
            let _ = fs::remove_dir(root.target.join(&self.name));
        }
    }
}

impl Machine {
    /// The hierarchies among the mounts of this machine; an error says what is missing.
    fn find(mounts: &[mount::MountInfo]) -> std::result::Result<Self, String> {
        let v2 = mounts.iter().filter(|mount| mount.fs_type == "cgroup2").map(|mount| &mount.target);
        for root in v2 {
            let offered = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
            if ["cpu", "memory", "pids"].iter().all(|name| offered.split_whitespace().any(|one| one == *name))
            {
                return Ok(Self::V2(root.clone()));
            }
        }
        let mut hierarchies: Vec<(PathBuf, Vec<Controller>)> = Vec::new();
        for mount in mounts.iter().filter(|mount| mount.fs_type == "cgroup") {
            let found = |controller: &Controller| {
                let is_known = hierarchies.iter().any(|(_, all)| all.contains(controller));
                !is_known && mount.super_options.split(',').any(|option| option == controller.name())
            };
            let controllers: Vec<Controller> = Controller::ALL.into_iter().filter(found).collect();
            if !controllers.is_empty() {
                hierarchies.push((mount.target.clone(), controllers));
            }
        }
        for needed in [Controller::Cpu, Controller::Memory] {
            if !hierarchies.iter().any(|(_, all)| all.contains(&needed)) {
                return Err(format!(
                    "this machine has no control group hierarchy with the {} controller mounted",
                    needed.name()
                ));
            }
        }
        Ok(Self::V1(hierarchies))
    }

    fn roots(&self) -> impl Iterator<Item = &PathBuf> {
        let (all, one) = match self {
            Self::V1(all) => (all.as_slice(), None),
            Self::V2(root) => (&[][..], Some(root)),
        };
        all.iter().map(|(root, _)| root).chain(one)
    }
}

/// Lets the groups below a group of version 2 have limits.
fn delegate(group: &Path) -> Result<()> {
    let path = group.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&path).doing("read", &path)?;
    for controller in ["cpu", "memory", "pids"] {
        if !enabled.split_whitespace().any(|one| one == controller) {
            write(&path, &format!("+{controller}"))?;
        }
    }
    Ok(())
}

/// The weight of version 2 for shares of version 1, as container runtimes convert them.
fn weight(shares: u64) -> u64 {
    1 + (shares - SHARES.start()) * 9999 / (SHARES.end() - SHARES.start())
}

/// The group of all pods of the runtime in a directory.
fn group_name(directory: &Path) -> String {
    let digest = Sha256::digest(directory.as_os_str().as_encoded_bytes());
    let number = digest[..8].try_into().map_or(0, u64::from_be_bytes);
    format!("berth-{number:016x}")
}

fn pod_group(uid: &str) -> String {
    format!("pod{uid}")
}

fn own_group(id: &ContainerId) -> PathBuf {
    Path::new(&pod_group(&id.pod_uid)).join(format!("{}_{}", id.name, id.attempt))
}

fn write(path: &Path, value: &str) -> Result<()> {
    let written = OpenOptions::new().write(true).open(path);
    written.and_then(|mut file| file.write_all(value.as_bytes())).doing(&format!("write {value} to"), path)
}

/// The names of the groups right below one.
fn children(group: &Path) -> Vec<String> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    let groups = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    groups.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn kill_members(group: &Path) {
    let members = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let members =
        members.lines().filter_map(|pid| pid.parse().ok()).filter_map(rustix::process::Pid::from_raw);
    for pid in members {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Removes a group as soon as the processes in it, all of which were killed, have left it.
fn remove_when_empty(group: &Path) {
    let deadline = Instant::now() + LEAVE_TIMEOUT;
    loop {
        match fs::remove_dir(group) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                thread::sleep(PAUSE);
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(group = %group.display(), %error, "a control group is left");
                return;
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests;

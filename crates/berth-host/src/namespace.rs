//! A user namespace with a mount namespace in it, for a program that mounts and runs containers without root.
//!
//! In its user namespace a process is root: it mounts what the kernel lets anybody mount (binds, tmpfs, overlay, FUSE), and
//! makes further namespaces. The ids that exist there are its own user, as 0, and those that `/etc/subuid` and `/etc/subgid`
//! give to the user, as 1 and up, where the machine has newuidmap and newgidmap.
//!
//! Namespaces end with their last process. So that mounts and containers outlive the program, as they do with root, a
//! process that does nothing else keeps the namespaces of a directory: [`enter`] finds it there by a file that it holds
//! locked, or starts it, and [`end`] ends it.
//!
//! Everything here has to happen while the process has one thread, which is what the kernel asks for.
#![expect(unsafe_code, reason = "fork(2) and unshare(2) have no safe wrapper")]

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    ops::RangeInclusive,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::Path,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{FlockOperation, flock},
    io::Errno,
    mount::{MountPropagationFlags, mount_change},
    pipe::{PipeFlags, pipe_with},
    process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal},
    thread::{ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces},
};

use crate::{
    error::{Doing as _, Error, Result},
    exec,
    path::Dir,
};

/// The file by which the process is found that keeps the namespaces of a directory.
const KEEPER: &str = "namespace";
/// How long newuidmap and newgidmap may take.
const MAP_TIMEOUT: Duration = Duration::from_secs(10);
/// What the map of the namespace says that the machine starts with.
const ALL: &str = "0 0 4294967295";

/// Which users and groups exist in the user namespace of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ids {
    users: Vec<RangeInclusive<u32>>,
    groups: Vec<RangeInclusive<u32>>,
    /// Whether processes may change their supplementary groups.
    pub can_set_groups: bool,
}

impl Ids {
    /// Reads them from the kernel. Where that is not possible, every id counts as there.
    pub fn read() -> Self {
        let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
        Self::parse(&read("uid_map"), &read("gid_map"), &read("setgroups"))
    }

    /// Those that the kernel's files `uid_map`, `gid_map` and `setgroups` say.
    pub fn parse(uid_map: &str, gid_map: &str, setgroups: &str) -> Self {
        Self { users: ranges(uid_map), groups: ranges(gid_map), can_set_groups: setgroups.trim() != "deny" }
    }

    /// Whether there is this user.
    pub fn has_user(&self, id: u32) -> bool {
        self.users.iter().any(|range| range.contains(&id))
    }

    /// Whether there is this group.
    pub fn has_group(&self, id: u32) -> bool {
        self.groups.iter().any(|range| range.contains(&id))
    }

    /// Whether there is no user but root.
    pub fn is_single(&self) -> bool {
        !self.has_user(1)
    }

    /// The users that exist, in words.
    pub fn describe_users(&self) -> String {
        describe(&self.users)
    }

    /// The groups that exist, in words.
    pub fn describe_groups(&self) -> String {
        describe(&self.groups)
    }
}

fn describe(ranges: &[RangeInclusive<u32>]) -> String {
    let last = ranges.iter().map(|range| *range.end()).max().unwrap_or(0);
    if last == 0 { "only 0".to_owned() } else { format!("0 to {last}") }
}

fn ranges(map: &str) -> Vec<RangeInclusive<u32>> {
    let range = |line: &str| {
        let numbers: Vec<u32> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match numbers[..] {
            [inside, _, count] if count > 0 => Some(inside..=inside.saturating_add(count - 1)),
            _ => None,
        }
    };
    let found: Vec<_> = map.lines().filter_map(range).collect();
    if found.is_empty() { vec![0..=u32::MAX] } else { found }
}

/// Whether this process is in another user namespace than the one that the machine starts with: it may be root there, but
/// not use devices, nor mount the filesystems on them.
pub fn is_restricted() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_else(|_| ALL.to_owned());
    map.split_whitespace().collect::<Vec<_>>().join(" ") != ALL
}

/// Whether root in this user namespace is an ordinary user of the machine, alone or with further ids, as after [`enter`].
pub fn is_own() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.lines().next().is_some_and(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        matches!(words[..], ["0", _, "1"])
    })
}

/// How this process came into its namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entered {
    /// They are new: nothing is mounted there besides what the machine has.
    New,
    /// They were there, with what is mounted in them.
    Kept,
}

/// Moves this process, which must have one thread, into a user namespace in which it is root, and a mount namespace there.
///
/// With a directory they are those that are kept for it, or new ones that are kept until [`end`]. Without one they are new,
/// and end with their last process. The error says in a sentence what an administrator can do about it.
pub fn enter(kept_for: Option<&Path>) -> Result<Entered> {
    let directory = std::env::current_dir();
    let entered = match kept_for {
        None => create(None),
        Some(kept_for) => {
            let kept_for = Dir::ensure(kept_for, 0o700)?;
            let _lock = lock(kept_for.path())?;
            let keeper = open_keeper(kept_for.path(), true)?;
            match find_keeper(&keeper, kept_for.path())? {
                Some(pid) => join(pid).map(|()| Entered::Kept),
                None => create(Some(&keeper)),
            }
        }
    };
    // To join a mount namespace leads to its root.
    if let Ok(directory) = directory {
        let _ = std::env::set_current_dir(directory);
    }
    entered
}

/// Ends the process that keeps the namespaces of a directory, if there is one. They end with the last process in them.
pub fn end(directory: &Path) -> Result<()> {
    let _lock = lock(directory)?;
    let keeper = match open_keeper(directory, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    if let Some(pid) = find_keeper(&keeper, directory)? {
        let stop = || -> rustix::io::Result<()> {
            let process = pidfd_open(pid, PidfdFlags::empty())?;
            pidfd_send_signal(&process, Signal::KILL)?;
            while poll(&mut [PollFd::new(&process, PollFlags::IN)], None)? == 0 {}
            Ok(())
        };
        match stop() {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(errno) => return Err(errno).doing("end the process that keeps the namespaces of", directory),
        }
    }
    Dir::open(directory)?.remove_file(KEEPER)?;
    Ok(())
}

/// Keeps two that start or end at the same time from each other: they are to share the namespaces.
fn lock(directory: &Path) -> Result<File> {
    let lock = File::open(directory).doing("open", directory)?;
    flock(&lock, FlockOperation::LockExclusive).doing("lock", directory)?;
    Ok(lock)
}

fn open_keeper(directory: &Path, create: bool) -> Result<File> {
    let path = directory.join(KEEPER);
    OpenOptions::new().read(true).write(true).create(create).mode(0o600).open(&path).doing("open", &path)
}

/// The process that keeps the namespaces, if it lives. If not, the file is locked for the caller.
fn find_keeper(file: &File, directory: &Path) -> Result<Option<Pid>> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => return Ok(None),
        Err(Errno::WOULDBLOCK) => {}
        Err(errno) => return Err(errno).doing("lock", directory.join(KEEPER)),
    }
    let path = directory.join(KEEPER);
    let text = fs::read_to_string(&path).doing("read", &path)?;
    let pid = text.trim().parse().ok().and_then(Pid::from_raw);
    let unknown = || io::Error::other("it names no process");
    pid.ok_or_else(unknown).doing("read", &path).map(Some)
}

/// Makes new namespaces. The process that keeps them inherits the lock of `keeper`; without one it ends when this process
/// is in the namespaces itself.
fn create(keeper: Option<&File>) -> Result<Entered> {
    let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(|errno| Error::new("make a pipe", errno));
    let ((made, report), (waits, go)) = (pipe()?, pipe()?);
    // SAFETY: this process has one thread, so the child may go on with any code.
    let child = match unsafe { libc::fork() } {
        -1 => return Err(Error::new("start a process for the namespaces", io::Error::last_os_error())),
        0 => {
            drop((made, go));
            keep(report, &waits, keeper)
        }
        pid => Pid::from_raw(pid).expect("the number of a child is positive"),
    };
    drop((report, waits));
    let prepared = read_report(made).and_then(|()| map_ids(child)).and_then(|()| {
        if let Some(mut keeper) = keeper {
            let number = format!("{}\n", child.as_raw_nonzero());
            keeper.set_len(0).and_then(|()| keeper.write_all(number.as_bytes())).doing("write", KEEPER)?;
        }
        join(child)
    });
    let mounts = || {
        // So that mounts of pods can be seen on the node where they ask for that, as on machines with systemd.
        mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)
            .map_err(|errno| refused("mounting in it was refused", errno.into()))
    };
    let entered = prepared.and_then(|()| mounts());
    if entered.is_ok() && keeper.is_some() {
        let _ = rustix::io::write(&go, b"k");
    } else {
        drop(go);
        let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
    }
    entered.map(|()| Entered::New)
}

/// Is the process that the namespaces are made in, and that keeps them where it is told to.
fn keep(report: OwnedFd, waits: &OwnedFd, keeper: Option<&File>) -> ! {
    // SAFETY: this process has one thread, and no descriptor is unshared.
    let made = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) };
    let errno = made.err().map_or(0, Errno::raw_os_error);
    let _ = rustix::io::write(&report, &errno.to_ne_bytes());
    drop(report);
    let mut told = [0];
    let is_kept = loop {
        match rustix::io::read(waits, &mut told) {
            Err(Errno::INTR) => {}
            Ok(1) => break true,
            _ => break false,
        }
    };
    if let (true, Some(keeper)) = (is_kept, keeper) {
        idle(keeper);
    }
    // SAFETY: _exit(2) has no preconditions.
    unsafe { libc::_exit(0) }
}

/// Holds nothing but the namespaces and the lock, until it is killed.
fn idle(keeper: &File) -> ! {
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir("/");
    let locked = keeper.as_raw_fd().unsigned_abs();
    // SAFETY: nothing of this process uses another descriptor from here on.
    unsafe {
        for stream in 0..=2 {
            libc::close(stream);
        }
        if locked > 3 {
            libc::syscall(libc::SYS_close_range, 3_u32, locked - 1, 0);
        }
        libc::syscall(libc::SYS_close_range, locked + 1, u32::MAX, 0);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::prctl(libc::PR_SET_NAME, c"berth-namespace".as_ptr());
        loop {
            libc::pause();
        }
    }
}

fn read_report(made: OwnedFd) -> Result<()> {
    let mut errno = [0; 4];
    let read = File::from(made).read_exact(&mut errno);
    let ended = |error| Error::new("make a user namespace", error);
    read.map_err(ended)?;
    match i32::from_ne_bytes(errno) {
        0 => Ok(()),
        errno => Err(refused("it was refused", io::Error::from_raw_os_error(errno))),
    }
}

fn join(pid: Pid) -> Result<()> {
    let both = ThreadNameSpaceType::USER | ThreadNameSpaceType::MOUNT;
    let joined = pidfd_open(pid, PidfdFlags::empty())
        .and_then(|process| move_into_thread_name_spaces(process.as_fd(), both));
    joined.map_err(|errno| Error::new("enter the user namespace", errno))
}

/// What is said where a machine lets no ordinary user have a user namespace, with the switch that forbids it where one does.
fn refused(what: &str, cause: io::Error) -> Error {
    let setting =
        |path: &str| fs::read_to_string(format!("/proc/sys/{path}")).map(|text| text.trim().to_owned());
    let switches = [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ];
    let found = switches.iter().find(|(path, forbids, _)| setting(path).is_ok_and(|value| value == *forbids));
    let advice = match found {
        Some((_, _, allow)) => format!("`sysctl -w {allow}` allows it"),
        None => "a container or a security module may forbid it".to_owned(),
    };
    Error::new(format!("without root this needs a user namespace, and {what} ({advice}; or use sudo)"), cause)
}

/// Gives the user namespace of a process its ids: those of this user, and those of its ranges where the machine helps.
fn map_ids(pid: Pid) -> Result<()> {
    let (user, group) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let number = pid.as_raw_nonzero();
    let by_range = |program: &str, ranges: &str, own: u32| {
        let (start, count) = range_of(&fs::read_to_string(ranges).unwrap_or_default(), user)?;
        let words = [number.to_string(), "0".into(), own.to_string(), "1".into(), "1".into(), start, count];
        exec::run(program, words, MAP_TIMEOUT)
            .inspect_err(|error| tracing::debug!(error = error.sentence(), "pods have one id only"))
            .ok()
    };
    let write = |name: &str, text: &str| {
        let path = format!("/proc/{number}/{name}");
        fs::write(&path, text).map_err(|error| refused("its ids could not be set", error))
    };
    // Root's processes map what they like, but then their ids are the machine's.
    if by_range("newuidmap", "/etc/subuid", user).is_none() {
        write("uid_map", &format!("0 {user} 1"))?;
    }
    if by_range("newgidmap", "/etc/subgid", group).is_none() {
        write("setgroups", "deny")?;
        write("gid_map", &format!("0 {group} 1"))?;
    }
    Ok(())
}

/// The first range of ids that a file such as `/etc/subuid` gives to a user, by number or name.
fn range_of(file: &str, user: u32) -> Option<(String, String)> {
    let names = names_of(&fs::read_to_string("/etc/passwd").unwrap_or_default(), user);
    file.lines().find_map(|line| {
        let [who, start, count] = line.trim().split(':').collect::<Vec<_>>()[..] else { return None };
        let is_ours = names.iter().any(|name| name == who);
        let is_range = start.parse::<u32>().is_ok() && count.parse::<u32>().is_ok_and(|count| count > 0);
        (is_ours && is_range).then(|| (start.to_owned(), count.to_owned()))
    })
}

fn names_of(passwd: &str, user: u32) -> Vec<String> {
    let number = user.to_string();
    let by_name = passwd.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == number).then(|| name.to_owned())
    });
    by_name.chain([number.clone()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_those_of_the_map() {
        let of = |users: &str, groups: &str| Ids::parse(users, groups, "allow");
        let one = of("         0       1000          1\n", "0 1000 1\n");
        assert!(one.has_user(0) && !one.has_user(1) && !one.has_group(65534) && one.is_single());
        assert_eq!(one.describe_users(), "only 0");
        let many = of("0 1000 1\n1 100000 65536\n", "0 1000 1\n1 100000 65536\n");
        assert!(many.has_user(65534) && many.has_group(65536) && !many.has_user(65537) && !many.is_single());
        assert_eq!(many.describe_groups(), "0 to 65536");
        let all = of("0 0 4294967295", "0 0 4294967295");
        assert!(all.has_user(4_294_967_294) && !all.has_user(u32::MAX));
        assert!(of("", "").has_user(7), "what cannot be read forbids nothing");
    }

    #[test]
    fn a_range_belongs_to_a_name_or_a_number() {
        let passwd = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\nbad\n";
        assert_eq!(names_of(passwd, 1000), ["ann", "1000"]);
        assert_eq!(names_of(passwd, 5), ["5"]);
        let ranges = "# a comment\nbob:100000:65536\n4242:165536:\n4242:165536:0\n4242:231072:65536\n";
        assert_eq!(range_of(ranges, 4242), Some(("231072".to_owned(), "65536".to_owned())));
        assert_eq!(range_of(ranges, 4243), None);
    }
}

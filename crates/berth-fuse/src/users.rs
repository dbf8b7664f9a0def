//! Whoever asks is who the server is asked as: uid, gid and further groups of the calling process.

use std::{
    collections::HashMap,
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use berth_nfs::{Nfs, Share};
use parking_lot::Mutex;

use crate::wire::Header;

/// How long a process is believed to have the same groups.
const BELIEVED: Duration = Duration::from_millis(500);
/// More than these are forgotten, and asked for again.
const MOST: usize = 1024;
const SIGKILL: u64 = 1 << 8;

/// The share as each user sees it.
#[derive(Debug)]
pub(crate) struct Users {
    nfs: Nfs,
    share: Share,
    known: Mutex<HashMap<Identity, Arc<User>>>,
    groups: Mutex<HashMap<Process, (Instant, Vec<u32>)>>,
}

/// A process by its number, uid and gid.
type Process = (u32, u32, u32);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Identity {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

/// The share as one user sees it.
#[derive(Debug)]
pub(crate) struct User {
    pub(crate) share: Share,
}

impl Users {
    pub(crate) fn new(nfs: Nfs, share: Share) -> Self {
        Self { nfs, share, known: Mutex::default(), groups: Mutex::default() }
    }

    /// Whoever sent this request.
    pub(crate) fn who(&self, header: &Header) -> Arc<User> {
        let groups = if header.uid == 0 { Vec::new() } else { self.groups(header) };
        let identity = Identity { uid: header.uid, gid: header.gid, groups };
        let mut known = self.known.lock();
        if known.len() >= MOST {
            known.clear();
        }
        let share = || self.nfs.share_as(&self.share, identity.uid, identity.gid, &identity.groups);
        known.entry(identity.clone()).or_insert_with(|| Arc::new(User { share: share() })).clone()
    }

    fn groups(&self, header: &Header) -> Vec<u32> {
        let key = (header.pid, header.uid, header.gid);
        let mut known = self.groups.lock();
        if let Some((at, groups)) = known.get(&key)
            && at.elapsed() < BELIEVED
        {
            return groups.clone();
        }
        if known.len() >= MOST {
            known.clear();
        }
        let groups = read_groups(header.pid, header.gid);
        known.insert(key, (Instant::now(), groups.clone()));
        groups
    }
}

fn read_groups(pid: u32, gid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    line.split_whitespace().filter_map(|word| word.parse().ok()).filter(|group| *group != gid).collect()
}

/// Whether this thread is being killed; `None` if that is not known.
pub(crate) fn is_killed(pid: u32) -> Option<bool> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let pending = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")))
        .filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    Some(pending.fold(0, |all, mask| all | mask) & SIGKILL != 0)
}

/// Whether this thread is on its way out, so that nobody will see the answer.
pub(crate) fn is_exiting(pid: u32) -> bool {
    // Who ends has given its memory back before it closes its files. Its flags would show that, too, but /proc/PID/stat waits
    // for a program that is being started, which closes files as well, and would wait for us.
    let memory = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    memory.split_whitespace().next() == Some("0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_lives_is_neither_killed_nor_exiting() {
        let own = std::process::id();
        assert_eq!(is_killed(own), Some(false));
        assert!(!is_exiting(own));
        assert_eq!(is_killed(0), None);
    }

    #[test]
    fn groups_are_those_of_the_process_without_its_first() {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap();
        let all: Vec<u32> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
        assert_eq!(read_groups(std::process::id(), u32::MAX), all);
        assert!(all.iter().all(|group| !read_groups(std::process::id(), *group).contains(group)));
    }
}

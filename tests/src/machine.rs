//! What is mounted and attached on this machine, by its own account.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::mount::UnmountFlags;

/// How long somebody else on this machine may hold a loop device that is to go.
const HELD: Duration = Duration::from_secs(30);

/// A loop device and the file behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loop {
    /// The device node, `/dev/loopN`.
    pub device: PathBuf,
    /// The backing file, as the kernel names it.
    pub backing: PathBuf,
}

/// A child process, to be started by the test.
#[expect(clippy::disallowed_methods, reason = "the tests drive the machine with its own tools")]
pub fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    Command::new(program)
}

/// Runs a tool and returns what it printed; its complaint is the error.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    let Output { status, stdout, stderr } =
        command(program).args(args).output().with_context(|| format!("start {program}"))?;
    let complaint = String::from_utf8_lossy(&stderr);
    ensure!(status.success(), "{program} {} ended with {status}: {complaint}", args.join(" "));
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// Mount points at or below `dir`, in the order they were mounted.
pub fn mounts_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
    let targets =
        table.lines().filter_map(|line| line.split(' ').nth(4)).map(|word| PathBuf::from(unescape(word)));
    Ok(targets.filter(|target| target.starts_with(dir)).collect())
}

/// Loop devices whose backing file lies below `dir`, also one that was deleted since.
pub fn loops_below(dir: &Path) -> Result<Vec<Loop>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block").context("list block devices")? {
        let entry = entry?;
        // A free device has no `loop` directory; one that is freed meanwhile is none of ours.
        let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let backing = PathBuf::from(backing.trim_end_matches('\n'));
        if backing.starts_with(dir) {
            found.push(Loop { device: Path::new("/dev").join(entry.file_name()), backing });
        }
    }
    Ok(found)
}

/// Waits until no such loop device is left. One that somebody else on this machine looks at just then goes a little later.
pub fn until_detached(attached: impl Fn() -> Result<Vec<Loop>>) -> Result<()> {
    let deadline = Instant::now() + HELD;
    loop {
        let left = attached()?;
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "still attached: {left:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Unmounts everything below `dir` and detaches every loop device with a file there, whatever it takes.
pub fn clear_below(dir: &Path) -> Result<()> {
    for round in 0..40 {
        let mounts = mounts_below(dir)?;
        if mounts.is_empty() && loops_below(dir)?.is_empty() {
            return Ok(());
        }
        // A disk is busy as long as a loop device holds a file on it, so the innermost go first, round by round; and
        // whoever was killed a moment ago takes a moment to let go.
        std::thread::sleep(Duration::from_millis(round));
        for target in mounts.iter().rev() {
            // A driver killed during a snapshot leaves filesystems frozen. Unmounted like that, one stays in the
            // kernel, with its loop device, where nobody can thaw it any more.
            let _ = command("fsfreeze").arg("-u").arg(target).output();
            let _ = rustix::mount::unmount(target.as_path(), UnmountFlags::empty());
        }
        for device in loops_below(dir)? {
            let _ = command("losetup").arg("-d").arg(&device.device).output();
        }
    }
    for target in mounts_below(dir)?.iter().rev() {
        rustix::mount::unmount(target.as_path(), UnmountFlags::DETACH).context("detach what stays busy")?;
    }
    anyhow::bail!("{} is still in use; loop devices: {:?}", dir.display(), loops_below(dir)?)
}

/// Every path below `dir`, relative, with type, size and link target: what "nothing changed" is judged by. What goes away
/// meanwhile, as from a driver's trash, is not there.
pub fn listing(dir: &Path) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    let mut pending = vec![dir.to_path_buf()];
    while let Some(here) = pending.pop() {
        let entries = match fs::read_dir(&here) {
            Err(error) if error.kind() == ErrorKind::NotFound && here != dir => continue,
            entries => entries.with_context(|| format!("list {}", here.display()))?,
        };
        for entry in entries {
            let path = entry?.path();
            let meta = match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                meta => meta?,
            };
            let name = path.strip_prefix(dir).expect("an entry lies below its directory").display();
            let kind = meta.file_type();
            if kind.is_dir() {
                lines.push(format!("{name}/"));
                pending.push(path);
            } else if kind.is_symlink() {
                lines.push(format!("{name} -> {}", fs::read_link(&path)?.display()));
            } else {
                lines.push(format!("{name} {}", meta.len()));
            }
        }
    }
    lines.sort();
    Ok(lines)
}

/// Undoes the octal escapes of the mount table.
fn unescape(word: &str) -> String {
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        let escape = code.filter(|_| byte == b'\\');
        plain.push(escape.unwrap_or(byte));
        rest = if escape.is_some() { &tail[3..] } else { tail };
    }
    String::from_utf8_lossy(&plain).into_owned()
}

#[cfg(test)]
mod tests {
    use super::unescape;

    #[test]
    fn escapes_of_the_mount_table_are_undone() {
        assert_eq!(unescape(r"/tmp/a\040b\134c"), r"/tmp/a b\c");
        assert_eq!(unescape(r"/tmp/end\"), r"/tmp/end\");
    }
}

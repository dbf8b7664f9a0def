//! Child processes of the shell.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

fn shell(script: &str, deadline: Duration) -> Result<Output> {
    run("sh", ["-c", script], deadline)
}

/// Whether the process whose number is in the file is gone, or dead and only not waited for by its parent.
fn is_dead(pid_file: &Path) -> bool {
    let pid = fs::read_to_string(pid_file).unwrap();
    match fs::read_to_string(format!("/proc/{}/stat", pid.trim())) {
        Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])),
        Err(_) => true,
    }
}

/// Death by signal is not instant; a minute is more than it takes.
fn dies(pid_file: &Path) -> bool {
    let start = Instant::now();
    while start.elapsed() < MINUTE {
        if is_dead(pid_file) {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn what_a_program_prints_is_returned() {
    let output = shell("echo out; echo err >&2", MINUTE).unwrap();
    assert_eq!(output, Output { code: 0, stdout: b"out\n".to_vec(), stderr: b"err\n".to_vec() });
}

#[test]
fn a_failing_program_is_an_error_with_what_it_said() {
    let error = shell("echo no such luck >&2; exit 3", MINUTE).unwrap_err();
    assert_eq!(error.sentence(), "run sh: exit code 3: no such luck");
    let error = shell("echo said aloud; exit 3", MINUTE).unwrap_err();
    assert_eq!(error.sentence(), "run sh: exit code 3: said aloud");
    let error = shell("kill -KILL $$", MINUTE).unwrap_err();
    assert_eq!(error.sentence(), "run sh: killed by signal 9");
}

#[test]
fn an_accepted_exit_code_is_not_an_error() {
    assert_eq!(run_accepting("sh", ["-c", "exit 1"], MINUTE, &[0, 1]).unwrap().code, 1);
    assert!(run_accepting("sh", ["-c", "exit 2"], MINUTE, &[0, 1]).is_err());
}

#[test]
fn a_missing_program_is_named() {
    let error = run("berth-no-such-program", [] as [&str; 0], MINUTE).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOENT));
    assert!(error.sentence().contains("berth-no-such-program"));
}

#[test]
fn standard_input_is_empty() {
    assert_eq!(run("cat", [] as [&str; 0], MINUTE).unwrap().stdout, b"");
}

#[test]
fn only_the_end_of_much_output_is_kept() {
    let output =
        shell("head -c 10000000 /dev/zero; printf end; head -c 100000 /dev/zero >&2; printf end >&2", MINUTE)
            .unwrap();
    assert_eq!((output.stdout.len(), output.stderr.len()), (STDOUT_KEPT, STDERR_KEPT));
    assert!(output.stdout.ends_with(b"\0end") && output.stderr.ends_with(b"\0end"));
}

#[test]
fn the_deadline_kills_the_child_and_its_children() {
    let dir = tempfile::tempdir().unwrap();
    let pids = ["child", "grandchild"].map(|name| dir.path().join(name));
    let script = format!(
        "echo $$ > {}; sh -c 'echo $$ > {}; sleep 1000; true' & wait",
        pids[0].display(),
        pids[1].display()
    );
    let is_written = |pid: &PathBuf| fs::read_to_string(pid).is_ok_and(|pid| pid.ends_with('\n'));
    // Later each time, until both had told by then who they are.
    for seconds in [1, 4, 16, 64] {
        let start = Instant::now();
        let error = shell(&script, Duration::from_secs(seconds)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ETIMEDOUT), "{}", error.sentence());
        assert!(start.elapsed() < Duration::from_secs(seconds + 30));
        if pids.iter().all(is_written) {
            break;
        }
    }
    for pid in &pids {
        assert!(dies(pid), "{}", pid.display());
    }
}

#[test]
fn a_child_that_never_stops_printing_meets_its_deadline() {
    let error = run("yes", [] as [&str; 0], Duration::from_millis(100)).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ETIMEDOUT));
}

#[test]
fn what_a_child_leaves_running_is_ended_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("left");
    let start = Instant::now();
    let output = shell(&format!("sleep 1000 & echo $! > {}; echo done", pid.display()), MINUTE).unwrap();
    assert_eq!(output.stdout, b"done\n");
    assert!(start.elapsed() < Duration::from_secs(30));
    assert!(dies(&pid));
}

#[test]
fn a_child_dies_with_the_process_that_runs_it() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("child");
    let script = format!("echo $$ > {}; exec sleep 1000", pid.display());
    // The death signal follows the thread, so a thread that ends stands for a process that is killed.
    let started = std::thread::spawn(move || spawn_tool("sh", ["-c", script.as_str()]).unwrap());
    let (mut group, _pipes) = started.join().unwrap();
    assert_eq!(group.0.wait().unwrap().signal(), Some(libc::SIGKILL));
}

fn foreign(script: &str, deadline: Duration, limit: usize) -> Result<Ended> {
    run_foreign(Path::new("/bin/sh"), ["-c", script], deadline, limit)
}

#[test]
fn both_outputs_of_a_foreign_program_are_one() {
    let ended = foreign("echo a; echo b >&2; echo c; exit 3", MINUTE, 100).unwrap();
    assert_eq!(ended, Ended { status: Ok(3), output: b"a\nb\nc\n".to_vec(), truncated: false });
    let ended = foreign("kill -TERM $$", MINUTE, 100).unwrap();
    assert_eq!((ended.status, ended.output), (Err(libc::SIGTERM), Vec::new()));
    let ended = foreign("head -c 3000000 /dev/zero", MINUTE, 100).unwrap();
    assert_eq!((ended.status, ended.output.len(), ended.truncated), (Ok(0), 100, true));
}

#[test]
fn a_foreign_program_is_killed_with_its_children_at_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("grandchild");
    let script = format!("sh -c 'echo $$ > {}; sleep 1000; true' & wait", pid.display());
    for seconds in [1, 4, 16, 64] {
        let error = foreign(&script, Duration::from_secs(seconds), 100).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ETIMEDOUT), "{}", error.sentence());
        if fs::read_to_string(&pid).is_ok_and(|pid| pid.ends_with('\n')) {
            break;
        }
    }
    assert!(dies(&pid));
}

#[test]
fn a_daemon_that_a_foreign_program_starts_goes_on_and_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("daemon");
    let ended = foreign(&format!("sleep 1000 & echo $! > {}; echo done", pid.display()), MINUTE, 100);
    assert_eq!(ended.unwrap().output, b"done\n");
    assert!(!is_dead(&pid));
    let number: i32 = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(number).unwrap(), Signal::KILL).unwrap();
    assert!(dies(&pid));
}

#[test]
fn a_program_that_cannot_be_started_is_an_error_and_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("program");
    fs::write(&path, "no program").unwrap();
    let errno = || run_foreign(&path, ["x"], MINUTE, 100).unwrap_err().errno();
    assert_eq!(errno(), Some(libc::EACCES));
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(errno(), Some(libc::ENOEXEC));
    let missing = run_foreign(&dir.path().join("none"), ["x"], MINUTE, 100).unwrap_err();
    assert_eq!(missing.errno(), Some(libc::ENOENT));
}

#[test]
fn a_program_blocks_no_signal_and_does_not_ignore_closed_pipes() {
    let script = "grep -E 'Sig(Blk|Ign)' /proc/self/status";
    let output = String::from_utf8(shell(script, MINUTE).unwrap().stdout).unwrap();
    let words: Vec<_> = output.split_whitespace().collect();
    assert_eq!(words[1], "0000000000000000", "blocked: {output}");
    let ignored = u64::from_str_radix(words[3], 16).unwrap();
    assert_eq!(ignored & (1 << (libc::SIGPIPE - 1)), 0, "{output}");
}

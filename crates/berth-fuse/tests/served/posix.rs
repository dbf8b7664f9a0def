//! The suites pjdfstest and fsx on a mount: what POSIX promises holds, or is on a list with the reason.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use crate::world::{Server, command};

/// Users that every machine has, in whose name the suite tries what is not allowed.
const CONFIGURATION: &str = "[features]\n[settings]\nnaptime = 0.01\nallow_remount = false\n[dummy_auth]\n\
                             entries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n";

/// What does not hold, and why: the beginnings of the names of tests.
const KNOWN_FAILURES: &[(&str, &str)] = &[
    ("link::remove_link::", SPECIAL_FILES),
    ("rename::to_multiply_linked::", SPECIAL_FILES),
    ("unlink::update_ctime_success::", SPECIAL_FILES),
];

/// Devices and sockets only: the tests of the same names hold for regular files, pipes and symbolic links. It is Ganesha's fault: on Berth's
/// own server all of them hold by the same client, see below, and EINVAL is what Ganesha answers.
const SPECIAL_FILES: &str = "when one of several names of a device node or socket was removed, nfs-ganesha answers GETATTR by its handle with \
                             EINVAL, by every version";

fn tool(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin").join(name);
    assert!(path.is_file(), "there is no {name}: install it first with `make deps`");
    path
}

/// Runs pjdfstest on a mount, and gives the tests that failed, with what they said.
fn failures_of_pjdfstest(server: &Server, version: &str) -> Vec<String> {
    let mounted = server.mount(version, "");
    let (top, directory) = (mounted.path(""), mounted.path("suite"));
    fs::set_permissions(&top, Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
    // The suite's other users have to get to the mount.
    fs::set_permissions(top.parent().unwrap(), Permissions::from_mode(0o755)).ok();
    let configuration = tempfile::NamedTempFile::new().unwrap();
    fs::write(configuration.path(), CONFIGURATION).unwrap();
    let run = command(tool("pjdfstest"))
        .arg("--configuration-file")
        .arg(configuration.path())
        .arg("--path")
        .arg(&directory)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout).into_owned();
    let summary = text
        .lines()
        .find(|line| line.starts_with("Summary:"))
        .unwrap_or_else(|| panic!("the suite did not end: {text}\n{}", String::from_utf8_lossy(&run.stderr)));
    eprintln!("version {version}: {summary}");
    let lines: Vec<&str> = text.lines().collect();
    let failed = lines.iter().enumerate().filter(|(_, line)| line.ends_with("FAILED"));
    failed.map(|(at, _)| lines[at..(at + 2).min(lines.len())].join(" ")).collect()
}

#[test]
fn a_mount_behaves_as_posix_has_it_but_for_what_is_listed() {
    for version in ["3", "4.2"] {
        let failures = failures_of_pjdfstest(&Server::start(&[]), version);
        let is_known = |failure: &&String| {
            let is_special = ["::block ", "::char ", "::socket "].iter().any(|kind| failure.contains(kind));
            let known = KNOWN_FAILURES.iter().find(|(name, _)| failure.starts_with(name));
            known.is_some_and(|(_, reason)| *reason != SPECIAL_FILES || is_special)
        };
        let unknown: Vec<&String> = failures.iter().filter(|failure| !is_known(failure)).collect();
        assert!(unknown.is_empty(), "version {version}: {unknown:#?}");
    }
}

#[test]
fn a_mount_of_berths_own_server_behaves_as_posix_has_it() {
    let failures = failures_of_pjdfstest(&Server::own(), "3");
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_file_holds_what_was_written_whatever_was_done_to_it() {
    for (server, version) in [(Server::start(&[]), "3"), (Server::start(&[]), "4.2"), (Server::own(), "3")] {
        let mounted = server.mount(version, "");
        let artifacts = tempfile::tempdir().unwrap();
        let run = command(tool("fsx"))
            .args(["-q", "-N", "2000", "-S", "7", "-P"])
            .arg(artifacts.path())
            .arg(mounted.path("file"))
            .output()
            .unwrap();
        assert!(run.status.success(), "version {version}: {run:?}");
        let _ = fs::remove_file(mounted.path("file"));
    }
}

//! The tests of this program once more, as an ordinary user in a user namespace of its own.

use std::os::unix::fs::chown;
use std::process::Command;

use crate::scratch::program;

/// A user that owns nothing on this machine.
const USER: u32 = 4711;
/// What needs another user, a device or a control group.
const WITH_ROOT_ONLY: [&str; 11] = [
    "rootless::",
    "limits::",
    "exec::another_user_is_not_given_what_is_the_hosts",
    "life::what_cannot_be_started_says_why",
    "security::a_device_node_in_a_restricted_volume_cannot_be_opened",
    "security::a_setuid_program_gives_no_rights",
    "security::another_user_has_no_capability",
    "security::files_of_the_kernel_are_masked",
    "user_namespaces::",
    "world::a_block_device_appears_where_it_is_wanted",
    "world::a_container_runs_as_the_user_that_is_asked_for",
];

#[test]
fn what_needs_no_other_user_and_no_device_holds_without_root() {
    let home = tempfile::tempdir().unwrap();
    let (tests, examples) = (home.path().join("deps"), home.path().join("examples"));
    for (directory, from) in [(&tests, std::env::current_exe().unwrap()), (&examples, program())] {
        std::fs::create_dir(directory).unwrap();
        assert!(Command::new("cp").arg(&from).arg(directory).status().unwrap().success());
    }
    chown(home.path(), Some(USER), Some(USER)).unwrap();
    let mut command = Command::new("setpriv");
    let user = USER.to_string();
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--inh-caps=-all"]);
    command.args(["unshare", "--user", "--map-root-user", "--mount", "--propagation", "shared"]);
    command.arg(tests.join(std::env::current_exe().unwrap().file_name().unwrap())).arg("--test-threads=2");
    command.args(WITH_ROOT_ONLY.iter().flat_map(|name| ["--skip", name]));
    let output = command.env("TMPDIR", home.path()).env("HOME", home.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("45 passed"), "{said}");
}

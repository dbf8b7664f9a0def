//! client-go's informers, leader elections and event recorders: a Go program whose server is killed now and then.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use super::{HISTORY, events};
use crate::served::Served;

/// Builds the program, from sources and modules pinned beside it.
#[expect(clippy::disallowed_methods, reason = "a build takes as long as it takes")]
fn build(binary: &Path) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/server/clients/informers");
    let built = Command::new("go").arg("build").arg("-o").arg(binary).arg(".").current_dir(sources).status();
    assert!(built.expect("go is installed").success());
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the program ends by itself, in vain or not")]
fn informers_of_client_go_miss_nothing_when_the_server_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("informers");
    build(&binary);
    let mut served = Served::start(dir.path(), HISTORY);
    let mut program = Command::new(&binary)
        .arg(dir.path().join("kubeconfig"))
        .arg((events(50_000) / 5).to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut last = String::new();
    for line in BufReader::new(program.stdout.take().unwrap()).lines() {
        last = line.unwrap();
        // It tells of every tenth; not after the last, so that there are changes after each restart.
        if matches!(last.strip_prefix("made "), Some(made) if !made.starts_with('1')) {
            served.kill();
            served.start_again();
        }
    }
    assert!(program.wait().unwrap().success());
    assert_eq!(last, "agreed");
}

//! The Go program that answers with Kubernetes' own libraries.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use parking_lot::Mutex;
use serde_json::{Value, json};

/// Where the Go module with the generator and the peer is.
pub(crate) const MODULE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/generate");

struct Peer {
    _process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

static PEER: OnceLock<Mutex<Peer>> = OnceLock::new();

/// Sends one question to the peer, which is started by the first call, and waits for the answer.
pub(crate) fn ask(question: &Value) -> Value {
    let mut peer = PEER.get_or_init(|| Mutex::new(start())).lock();
    let mut line = question.to_string();
    line.push('\n');
    peer.input.write_all(line.as_bytes()).expect("the peer listens");
    let mut answer = String::new();
    peer.output.read_line(&mut answer).expect("the peer answers");
    serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer:?} to {question}"))
}

/// A question about an object of this kind.
pub(crate) fn about(op: &str, (group, version, kind): (&str, &str, &str)) -> Value {
    json!({"op": op, "group": group, "version": version, "kind": kind})
}

/// Go, to be run in the module.
#[expect(clippy::disallowed_methods, reason = "a test runs Go")]
pub(crate) fn go(arguments: &[&str]) -> Command {
    let mut command = Command::new("go");
    command.current_dir(MODULE).args(arguments);
    command
}

/// The directory with the published OpenAPI documents.
pub(crate) fn openapi() -> PathBuf {
    let module = "k8s.io/kubernetes@v1.36.3";
    let output = go(&["mod", "download", "-json", module])
        .output()
        .unwrap_or_else(|error| panic!("go does not run ({error}): these tests need Go"));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let Some(directory) = answer["Dir"].as_str() else {
        panic!("go mod download {module} gave no directory: {answer} {:?}", output.stderr);
    };
    Path::new(directory).join("api/openapi-spec")
}

#[expect(clippy::disallowed_methods, reason = "a test runs its peer")]
fn start() -> Peer {
    let binary = Path::new(env!("CARGO_TARGET_TMPDIR")).join("peer");
    let built = go(&["build", "-o"]).arg(&binary).arg("./peer").output().expect("go runs");
    assert!(built.status.success(), "building the peer: {}", String::from_utf8_lossy(&built.stderr));
    let mut process = Command::new(&binary)
        .arg(openapi())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the peer starts");
    let input = process.stdin.take().expect("it has an input");
    let output = BufReader::new(process.stdout.take().expect("it has an output"));
    Peer { _process: process, input, output }
}

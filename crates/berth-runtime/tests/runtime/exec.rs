//! More processes in a running container.

use std::time::Duration;

use berth_runtime::{ContainerId, Error, Exec, ExecCall, ExecOutput, Processes, Runtime as _, TerminalSize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::scratch::{SOON, Scratch, processes, until};

async fn running(scratch: &Scratch) -> (Processes, ContainerId) {
    let runtime = scratch.open();
    let mut spec = scratch.spec(&["sleep", "1000"]);
    spec.hostname = "inside".into();
    spec.env.push(("NAME".into(), "value".into()));
    spec.working_dir = Some("/var/work".into());
    let id = runtime.start(spec).await.unwrap();
    (runtime, id)
}

fn call(command: &[&str]) -> ExecCall {
    ExecCall { command: command.iter().map(ToString::to_string).collect(), ..Default::default() }
}

pub(crate) async fn all(output: Option<ExecOutput>) -> String {
    let mut text = String::new();
    let mut output = output.expect("there is such an output");
    tokio::time::timeout(SOON, output.read_to_string(&mut text)).await.expect("the output ends").unwrap();
    text
}

async fn code(mut exec: Exec) -> i32 {
    tokio::time::timeout(SOON, exec.wait()).await.expect("the process ends").unwrap()
}

#[tokio::test]
async fn a_process_joins_the_world_of_its_container() {
    let scratch = Scratch::new();
    let (runtime, id) = running(&scratch).await;
    let script = "hostname; echo $NAME; pwd; cat /proc/2/comm; echo oops >&2; touch /made; exit 6";
    let mut exec = runtime.exec(&id, call(&["sh", "-c", script])).await.unwrap();
    assert!(exec.stdin.is_none());
    assert_eq!(all(exec.stdout.take()).await, "inside\nvalue\n/var/work\nsleep\n");
    assert_eq!(all(exec.stderr.take()).await, "oops\n");
    assert_eq!(code(exec).await, 6);
    let exec = runtime.exec(&id, call(&["test", "-e", "/made"])).await.unwrap();
    assert_eq!(code(exec).await, 0);
    assert!(!std::path::Path::new("/made").exists());
    let exec = runtime.exec(&id, call(&["sh", "-c", "kill -TERM $$"])).await.unwrap();
    assert_eq!(code(exec).await, 143);
}

#[tokio::test]
async fn another_user_is_not_given_what_is_the_hosts() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mut spec = scratch.spec(&["sleep", "1000"]);
    spec.user = Some(1234);
    let id = runtime.start(spec).await.unwrap();
    // Without input it is a /dev/null; its output is a pipe of its own.
    let script = "stat -L -c %u /proc/self/fd/0; stat -L -c %u /proc/self/fd/1; echo opened > /dev/stdout";
    let mut exec = runtime.exec(&id, call(&["sh", "-c", script])).await.unwrap();
    assert_eq!(all(exec.stdout.take()).await, "0\n1234\nopened\n");
    assert_eq!(code(exec).await, 0);
}

#[tokio::test]
async fn input_reaches_the_process_and_its_end_too() {
    let scratch = Scratch::new();
    let (runtime, id) = running(&scratch).await;
    let mut exec = runtime.exec(&id, ExecCall { stdin: true, ..call(&["cat"]) }).await.unwrap();
    let mut stdin = exec.stdin.take().unwrap();
    let text = "line\n".repeat(100_000);
    let write = async {
        stdin.write_all(text.as_bytes()).await.unwrap();
        drop(stdin);
    };
    let ((), echoed) = tokio::join!(write, all(exec.stdout.take()));
    assert!(echoed == text);
    assert_eq!(code(exec).await, 0);
}

#[tokio::test]
async fn a_terminal_has_a_size_a_name_and_control() {
    let scratch = Scratch::new();
    let (runtime, id) = running(&scratch).await;
    let size = Some(TerminalSize { width: 100, height: 40 });
    let script = "tty; stty size; read line; echo got $line; trap 'stty size; exit 7' WINCH; echo ready; while :; do sleep 0.01; done";
    let terminal = ExecCall { tty: true, stdin: true, size, ..call(&["sh", "-c", script]) };
    let mut exec = runtime.exec(&id, terminal).await.unwrap();
    assert!(exec.stderr.is_none());
    exec.stdin.as_mut().unwrap().write_all(b"hello\n").await.unwrap();
    let mut stdout = exec.stdout.take().unwrap();
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains("ready") {
        assert_ne!(stdout.read_buf(&mut text).await.unwrap(), 0, "{}", String::from_utf8_lossy(&text));
    }
    exec.resize(TerminalSize { width: 120, height: 50 }).unwrap();
    text.extend(all(Some(stdout)).await.into_bytes());
    let text = String::from_utf8(text).unwrap();
    // The terminal echoes the line when it comes, before or after the size is told.
    let (before, after) = text.split_at(text.find("got").unwrap());
    assert_eq!(after, "got hello\r\nready\r\n50 120\r\n");
    assert!(before.contains("/dev/pts/0\r\n") && before.contains("40 100\r\n"), "{text}");
    assert_eq!(code(exec).await, 7);
}

#[tokio::test]
async fn a_process_is_killed_when_its_caller_goes_away() {
    let scratch = Scratch::new();
    let (runtime, id) = running(&scratch).await;
    let exec = runtime.exec(&id, call(&["sh", "-c", "sleep 43210; true"])).await.unwrap();
    until("it runs", || processes("sleep 43210").iter().any(|line| !line.contains("sh -c"))).await;
    drop(exec);
    until("it is killed", || processes("sleep 43210").is_empty()).await;
    let exec = runtime.exec(&id, call(&["sleep", "43210"])).await.unwrap();
    runtime.stop(&id, Duration::ZERO).await;
    assert_eq!(code(exec).await, 137);
    assert!(matches!(runtime.exec(&id, call(&["true"])).await, Err(Error::NotRunning(_))));
}

#[tokio::test]
async fn what_cannot_be_started_says_why() {
    let scratch = Scratch::new();
    let (runtime, id) = running(&scratch).await;
    let Err(error) = runtime.exec(&id, call(&["no-such-command"])).await else { panic!("there is none") };
    let why = r#"exec: "no-such-command": executable file not found in $PATH"#;
    assert!(error.to_string().ends_with(why), "{error}");
    let nobody = ContainerId { attempt: 1, ..id };
    assert!(matches!(runtime.exec(&nobody, call(&["true"])).await, Err(Error::NotFound(_))));
}

#[tokio::test]
async fn a_container_may_have_a_terminal_itself() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let mut spec = scratch.sh("tty; test -t 0 && test -t 2 && echo yes; echo err >&2; exit 3");
    (spec.tty, spec.stdin) = (true, true);
    let (printed, exited) = scratch.run(&runtime, spec).await;
    assert_eq!((printed.replace('\r', "").as_str(), exited.code), ("/dev/pts/0\nyes\nerr", 3));
    let mut spec = scratch.sh("read line; echo never");
    spec.stdin = true;
    let id = runtime.start(spec).await.unwrap();
    assert_eq!(runtime.stop(&id, Duration::from_secs(10)).await.code, 143);
}

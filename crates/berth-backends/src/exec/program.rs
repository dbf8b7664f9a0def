//! Runs a program: once for each operation, or a few processes that stay and answer line by line.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use berth_host::exec::{Dialog, Said};
use parking_lot::Mutex;
use rustix::io::Errno;
use serde_json::Value;
use tokio::sync::{Semaphore, oneshot};

use super::protocol::{Fields, Operation, judge, redact};
use crate::{Context, Error, Result, Secrets};

/// As much as a program may print for one operation.
const OUTPUT_LIMIT: usize = 1 << 20;
/// How much of what is no answer is shown.
const SHOWN: usize = 200;

/// A program that is asked; cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Program(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    timeout: Duration,
    /// For processes that stay.
    stays: Option<Pool>,
}

/// Processes that stay, each of which answers one operation at a time.
#[derive(Debug)]
struct Pool {
    idle: Mutex<Vec<Process>>,
    permits: Semaphore,
}

/// A thread that owns a process: the kernel kills the process when its thread ends.
#[derive(Debug)]
struct Process {
    requests: mpsc::Sender<(Vec<u8>, oneshot::Sender<Outcome>)>,
    /// Whether it has answered before, so that an end without an answer may be older than the request.
    used: bool,
}

type Outcome = berth_host::Result<Said>;

impl Program {
    /// A program to run for each operation, or with `processes` of it that stay.
    pub(super) fn new(path: &Path, timeout: Duration, processes: Option<usize>) -> Self {
        let stays = processes
            .map(|processes| Pool { idle: Mutex::default(), permits: Semaphore::new(processes.max(1)) });
        Self(Arc::new(Inner { path: path.to_owned(), timeout, stays }))
    }

    /// Has the program do something. `what` is the thing that NOT_FOUND would be about.
    pub(super) async fn ask(
        &self,
        ctx: &Context,
        operation: Operation,
        fields: Fields,
        what: (&'static str, &str),
    ) -> Result<Value> {
        let begun = Instant::now();
        let outcome = match &self.0.stays {
            None => self.run(ctx, operation, &fields).await,
            Some(pool) => self.converse(pool, ctx, operation, &fields).await,
        };
        let answer = outcome
            .and_then(|said| self.read(ctx.secrets(), operation, &said))
            .and_then(|reply| judge(operation, reply, what))
            .map_err(|error| redacted(error, ctx.secrets()));
        let took = begun.elapsed();
        match &answer {
            Ok(_) => {
                tracing::debug!(operation = operation.name(), id = what.1, ?took, "the program answered");
            }
            Err(error) => {
                tracing::debug!(operation = operation.name(), id = what.1, ?took, %error, "the program failed");
            }
        }
        answer
    }

    /// Runs the program for one operation.
    async fn run(&self, ctx: &Context, operation: Operation, fields: &Fields) -> Result<Said> {
        let (path, timeout) = (self.0.path.clone(), self.0.timeout);
        let (document, environment) = (fields.document(operation, ctx), fields.environment(operation));
        let (sender, receiver) = oneshot::channel();
        let work = move || {
            let said = Dialog::start(&path, [operation.name()], environment)
                .and_then(|dialog| dialog.finish(&document, timeout, OUTPUT_LIMIT));
            let _ = sender.send(said);
        };
        thread(work)?;
        self.outcome(operation, receiver).await
    }

    /// Has a process answer that stays.
    async fn converse(
        &self,
        pool: &Pool,
        ctx: &Context,
        operation: Operation,
        fields: &Fields,
    ) -> Result<Said> {
        let line = fields.document(operation, ctx);
        let _permit =
            pool.permits.acquire().await.map_err(|_| Error::internal("the pool of processes is closed"))?;
        loop {
            let idle = pool.idle.lock().pop();
            let mut process = match idle {
                Some(process) => process,
                None => self.start()?,
            };
            let (sender, receiver) = oneshot::channel();
            // A thread that is gone drops the sender, which says the same.
            let _ = process.requests.send((line.clone(), sender));
            let said = match self.outcome(operation, receiver).await {
                // One that ended while nobody asked it anything says nothing about this operation.
                Ok(Said { status: Some(_), output, .. }) if process.used && output.is_empty() => continue,
                said => said?,
            };
            if said.status.is_none() && !said.truncated {
                process.used = true;
                pool.idle.lock().push(process);
            }
            return Ok(said);
        }
    }

    fn start(&self) -> Result<Process> {
        let (requests, asked) = mpsc::channel::<(Vec<u8>, oneshot::Sender<Outcome>)>();
        let (path, timeout) = (self.0.path.clone(), self.0.timeout);
        thread(move || {
            let mut dialog = None;
            while let Ok((line, answer)) = asked.recv() {
                let outcome = match &mut dialog {
                    Some(dialog) => Ok(dialog),
                    None => Dialog::start(&path, ["serve"], []).map(|started| dialog.insert(started)),
                }
                .and_then(|dialog| dialog.exchange(&line, timeout, OUTPUT_LIMIT));
                let goes_on = outcome.as_ref().is_ok_and(|said| said.status.is_none());
                let _ = answer.send(outcome);
                if !goes_on {
                    return;
                }
            }
        })?;
        Ok(Process { requests, used: false })
    }

    async fn outcome(&self, operation: Operation, receiver: oneshot::Receiver<Outcome>) -> Result<Said> {
        let name = operation.name();
        let outcome = receiver
            .await
            .map_err(|_| Error::Unavailable(format!("{name}: the thread that ran the program ended")))?;
        outcome.map_err(|error| {
            if error.errno() == Some(Errno::TIMEDOUT.raw_os_error()) {
                let timeout = self.0.timeout;
                Error::Unavailable(format!(
                    "{name}: the program did not answer within {timeout:?} and was killed"
                ))
            } else {
                Error::Unavailable(format!("{name}: {}", not_run(&self.0.path, &error)))
            }
        })
    }

    /// What the program printed, as JSON. Its complaints go to the log, without secrets.
    fn read(&self, secrets: &Secrets, operation: Operation, said: &Said) -> Result<Value> {
        let name = operation.name();
        let errors = redact(&String::from_utf8_lossy(&said.errors), secrets);
        for line in errors.lines().filter(|line| !line.trim().is_empty()) {
            tracing::info!(program = %self.0.path.display(), operation = name, "{line}");
        }
        let output = String::from_utf8_lossy(&said.output);
        let output = output.trim();
        let shown = |text: &str| text.chars().take(SHOWN).collect::<String>();
        if said.truncated {
            let begin = shown(output);
            return Err(Error::Unavailable(format!(
                "{name}: the program printed more than {} KiB, beginning with {begin:?}",
                OUTPUT_LIMIT >> 10
            )));
        }
        let reply = serde_json::from_str::<Value>(if output.is_empty() { "{}" } else { output });
        // A program that fails may say why as the interface has it, or in its own words.
        let says_why =
            matches!(&reply, Ok(reply) if reply.get("error").is_some_and(|error| !error.is_null()));
        let ended = match said.status {
            None | Some(Ok(0)) if output.is_empty() && said.status.is_none() => {
                return Err(Error::Unavailable(format!("{name}: the program answered an empty line")));
            }
            None | Some(Ok(0)) => None,
            Some(Ok(code)) => Some(format!("exit status {code}")),
            Some(Err(signal)) => Some(format!("signal {signal}")),
        };
        match (ended, reply) {
            (Some(ended), _) if !says_why => {
                let last = errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
                let why = if last.is_empty() { String::new() } else { format!(": {}", shown(last)) };
                Err(Error::Unavailable(format!("{name}: the program ended with {ended}{why}")))
            }
            (_, Ok(reply)) => Ok(reply),
            (_, Err(error)) => Err(Error::Unavailable(format!(
                "{name}: the program printed no JSON ({error}): {:?}",
                shown(output)
            ))),
        }
    }
}

fn thread(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name("exec".to_owned()).spawn(work);
    started.map(drop).map_err(|error| Error::Unavailable(format!("no thread for the program: {error}")))
}

/// What the system's answer to a failed start means for whoever wrote the program.
fn not_run(program: &Path, error: &berth_host::Error) -> String {
    match std::fs::metadata(program) {
        Err(missing) => format!("the program {} cannot be run: {missing}", program.display()),
        Ok(found) if !found.is_file() => format!("the program {} is not a file", program.display()),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => {
            format!("the program {} may not be executed; run chmod +x on it", program.display())
        }
        Ok(_) => error.sentence(),
    }
}

/// An error without the secrets that the program may have put into its words.
fn redacted(error: Error, secrets: &Secrets) -> Error {
    if secrets.is_empty() {
        return error;
    }
    let clean = |text: String| redact(&text, secrets);
    match error {
        Error::Invalid(text) => Error::Invalid(clean(text)),
        Error::Conflict(text) => Error::Conflict(clean(text)),
        Error::Precondition(text) => Error::Precondition(clean(text)),
        Error::OutOfRange(text) => Error::OutOfRange(clean(text)),
        Error::Exhausted(text) => Error::Exhausted(clean(text)),
        Error::Busy(text) => Error::Busy(clean(text)),
        Error::Unavailable(text) => Error::Unavailable(clean(text)),
        Error::Denied(text) => Error::Denied(clean(text)),
        Error::State(text) => Error::State(clean(text)),
        other @ (Error::NotFound { .. } | Error::Unsupported(_) | Error::Host(_)) => other,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    struct Script {
        directory: tempfile::TempDir,
    }

    impl Script {
        fn new(body: &str) -> Self {
            let directory = tempfile::tempdir().unwrap();
            // Written under another name by a process that ends: who forks meanwhile cannot keep it open for writing.
            let (body_file, path) = (directory.path().join("body"), directory.path().join("driver"));
            std::fs::write(&body_file, format!("#!/bin/sh\n{body}\n")).unwrap();
            std::fs::set_permissions(&body_file, std::fs::Permissions::from_mode(0o755)).unwrap();
            berth_host::exec::run("cp", [&body_file, &path], Duration::from_secs(60)).unwrap();
            Self { directory }
        }

        fn program(&self, timeout: Duration, processes: Option<usize>) -> Program {
            Program::new(&self.directory.path().join("driver"), timeout, processes)
        }
    }

    async fn ask(program: &Program, secret: &str) -> Result<Value> {
        let secrets: BTreeMap<String, String> = [("password".to_owned(), secret.to_owned())].into();
        let ctx = Context::new(None, secrets.into(), &BTreeMap::new());
        program.ask(&ctx, Operation::Create, Fields::default().with("id", "v-1"), ("volume", "v-1")).await
    }

    #[tokio::test]
    async fn what_a_program_does_wrong_is_said_without_its_secrets() {
        const MINUTE: Duration = Duration::from_secs(60);
        for (body, expected) in [
            ("echo garbage", "create: the program printed no JSON"),
            ("cat", "the program's answer"),
            ("echo '{}' '{}'", "create: the program printed no JSON"),
            ("echo '[]'", "JSON that is not an object"),
            ("echo no such disk >&2; exit 3", "create: the program ended with exit status 3: no such disk"),
            ("cat >&2; exit 1", "create: the program ended with exit status 1: "),
            ("kill -9 $$", "create: the program ended with signal 9"),
            ("echo '{}'; exit 1", "create: the program ended with exit status 1"),
            ("head -c 2000000 /dev/zero", "printed more than 1024 KiB"),
            (
                r#"sed 's/.*password":"\([^"]*\)".*/{"error":{"code":"INTERNAL","message":"bad \1"}}/'"#,
                "create: bad ***",
            ),
            (
                r#"echo '{"error":{"code":"OUT_OF_RANGE","message":"too large"}}'; exit 7"#,
                "create: too large",
            ),
        ] {
            let script = Script::new(body);
            let reply = ask(&script.program(MINUTE, None), "open sesame").await;
            // An answer whose fields are not an operation's is refused by whoever reads it.
            let error = match reply {
                Ok(reply) => {
                    super::super::protocol::read::<super::super::protocol::Created>(Operation::Create, reply)
                        .map(|created| format!("{created:?}"))
                        .unwrap_err()
                }
                Err(error) => error,
            };
            let said = error.to_string();
            assert!(said.contains(expected), "{body}: {said}");
            assert!(!said.contains("open sesame"), "{body}: {said}");
        }
        let hangs = Script::new("exec sleep 1000");
        let error = ask(&hangs.program(Duration::from_millis(300), None), "x").await.unwrap_err();
        assert!(
            matches!(&error, Error::Unavailable(said) if said.contains("within 300ms and was killed")),
            "{error}"
        );
        let absent = Program::new(Path::new("/nowhere/driver"), MINUTE, None);
        let error = ask(&absent, "x").await.unwrap_err().to_string();
        assert!(error.contains("/nowhere/driver cannot be run: No such file"), "{error}");
        let silent = Script::new("true");
        assert_eq!(ask(&silent.program(MINUTE, None), "x").await.unwrap(), serde_json::json!({}));
    }

    #[tokio::test]
    async fn processes_that_stay_answer_again_and_are_replaced_when_they_end() {
        // Each process answers twice and then ends.
        let body = r#"[ "$1" = serve ] || exit 9
            for turn in 1 2; do read -r line && echo "{\"context\":{\"pid\":\"$$\",\"turn\":\"$turn\"}}"; done"#;
        let script = Script::new(body);
        let program = script.program(Duration::from_secs(60), Some(2));
        let mut seen = Vec::new();
        for _ in 0..5 {
            let reply = ask(&program, "hush").await.unwrap();
            seen.push((reply["context"]["pid"].to_string(), reply["context"]["turn"].to_string()));
        }
        let turns: Vec<&str> = seen.iter().map(|(_, turn)| turn.trim_matches('"')).collect();
        assert_eq!(turns, ["1", "2", "1", "2", "1"]);
        assert!(seen[0].0 == seen[1].0 && seen[1].0 != seen[2].0, "{seen:?}");
        // One that hangs is killed; the others answer meanwhile.
        let hangs = Script::new(r#"read -r line; case "$line" in *hang*) exec sleep 1000;; esac; echo '{}'"#);
        let program = hangs.program(Duration::from_secs(3), Some(2));
        let (hung, well) = tokio::join!(ask(&program, "hang"), ask(&program, "well"));
        assert!(hung.unwrap_err().to_string().contains("was killed"));
        assert_eq!(well.unwrap(), serde_json::json!({}));
        let dies = Script::new("read -r line; exit 5");
        let error =
            ask(&dies.program(Duration::from_secs(60), Some(1)), "hush").await.unwrap_err().to_string();
        assert!(error.contains("exit status 5"), "{error}");
    }
}

//! One run of a driver's executable, and a driver that answered `init`.

use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use berth_host::exec::{self, Ended};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::call::Call;
use crate::name::DriverName;
use crate::reply::{Capabilities, Reply, ReplyError, Status, shown};

/// As much as a driver may print in one call; the replies of real drivers have some hundred bytes.
const OUTPUT_LIMIT: usize = 1 << 20;
/// The errno of a call that was killed at its deadline.
const TIMED_OUT: i32 = rustix::io::Errno::TIMEDOUT.raw_os_error();

/// How long call-outs may take. The kubelet limits only `waitforattach`, to ten minutes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// For `init`, which the driver does not work for.
    pub init: Duration,
    /// For every other call-out.
    pub call: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { init: Duration::from_secs(30), call: Duration::from_secs(600) }
    }
}

/// Why a call-out failed; a sentence for an event, without values of Secrets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The executable could not be started: nothing happened.
    #[error("{call} command failed: the driver's executable cannot be run: {cause}")]
    NotRun {
        /// The name of the call-out.
        call: &'static str,
        /// What the system said.
        cause: String,
    },
    /// The driver did not end in time, and was killed with its process group.
    #[error("{call} command failed: the driver did not answer within {after:?} and was killed")]
    TimedOut {
        /// The name of the call-out.
        call: &'static str,
        /// The time that it had.
        after: Duration,
    },
    /// What the driver printed is more than a reply can be.
    #[error("{call} command failed: the driver printed more than {} KiB, beginning with {said}", OUTPUT_LIMIT >> 10)]
    TooMuchOutput {
        /// The name of the call-out.
        call: &'static str,
        /// The beginning of what it printed.
        said: String,
    },
    /// What the driver printed is not a reply.
    #[error("{call} command failed: the driver ended with {ended}, and {reply}")]
    NoReply {
        /// The name of the call-out.
        call: &'static str,
        /// How the driver ended: an exit code or a signal.
        ended: String,
        /// What is wrong with what it printed.
        reply: ReplyError,
    },
    /// The driver reported success and ended as if it had failed.
    #[error("{call} command failed: the driver ended with {ended} although its reply says Success")]
    Contradiction {
        /// The name of the call-out.
        call: &'static str,
        /// How the driver ended: an exit code or a signal.
        ended: String,
    },
    /// The driver reported a failure; the sentence is the kubelet's.
    #[error("{call} command failed, status: {status}, reason: {message}")]
    Failure {
        /// The name of the call-out.
        call: &'static str,
        /// The status of its reply.
        status: Status,
        /// What the driver says of it.
        message: String,
    },
    /// The driver does not answer a call-out that no driver can do without.
    #[error("{call} command failed: the driver does not support it, and nothing can take its place")]
    Required {
        /// The name of the call-out.
        call: &'static str,
    },
}

impl Error {
    /// Whether the driver did not even start, so that everything is as before.
    pub fn is_unstarted(&self) -> bool {
        matches!(self, Self::NotRun { .. })
    }

    /// Whether the driver was stopped in the middle of its work, so that anything may have happened.
    pub fn is_interrupted(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }
}

/// Runs a driver's executable for one call-out; `None` if the driver does not support it.
///
/// The exit code and the reply must agree: a reply of success with another exit code than 0 is an error. Blocks until
/// the driver ended, at most for `timeout`.
pub fn run(executable: &Path, call: &Call, timeout: Duration) -> Result<Option<Reply>, Error> {
    let name = call.name();
    let begun = Instant::now();
    let ended =
        exec::run_foreign(executable, call.command_line(), timeout, OUTPUT_LIMIT).map_err(|error| {
            if error.errno() == Some(TIMED_OUT) {
                Error::TimedOut { call: name, after: timeout }
            } else {
                Error::NotRun { call: name, cause: not_run(executable, &error) }
            }
        })?;
    let outcome = judge(call, &ended);
    let took = begun.elapsed();
    match &outcome {
        Ok(_) => tracing::debug!(executable = %executable.display(), call = name, ?took, "call-out"),
        Err(error) => {
            tracing::debug!(executable = %executable.display(), call = name, ?took, %error, "call-out");
        }
    }
    outcome
}

/// What the system's answer to a failed start means for whoever installs drivers.
fn not_run(executable: &Path, error: &berth_host::Error) -> String {
    match std::fs::metadata(executable) {
        Err(missing) => format!("{}: {missing}", executable.display()),
        Ok(found) if !found.is_file() => format!("{} is not a file", executable.display()),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => {
            format!("{} may not be executed; run chmod +x on it", executable.display())
        }
        Ok(_) => error.sentence(),
    }
}

fn judge(call: &Call, ended: &Ended) -> Result<Option<Reply>, Error> {
    let name = call.name();
    let redact = |text: &str| call.options().map_or_else(|| text.to_owned(), |options| options.redact(text));
    let end = match ended.status {
        Ok(code) => format!("exit code {code}"),
        Err(signal) => format!("signal {signal}"),
    };
    if ended.truncated {
        let said = shown(&redact(&String::from_utf8_lossy(&ended.output)));
        return Err(Error::TooMuchOutput { call: name, said });
    }
    let reply = Reply::parse(&ended.output).map_err(|error| {
        let reply = match error {
            ReplyError::NotJson { why, said } => {
                ReplyError::NotJson { why: redact(&why), said: redact(&said) }
            }
            ReplyError::SeveralDocuments(said) => ReplyError::SeveralDocuments(redact(&said)),
            other => other,
        };
        Error::NoReply { call: name, ended: end.clone(), reply }
    })?;
    match reply.status {
        Status::NotSupported => Ok(None),
        Status::Success if ended.status == Ok(0) => Ok(Some(reply)),
        Status::Success => Err(Error::Contradiction { call: name, ended: end }),
        Status::Failure | Status::Other(_) | Status::Missing => Err(Error::Failure {
            call: name,
            message: redact(&reply.message),
            status: match reply.status {
                Status::Other(status) => Status::Other(redact(&status)),
                status => status,
            },
        }),
    }
}

/// A driver that answered `init`.
#[derive(Debug)]
pub struct Driver {
    name: DriverName,
    executable: PathBuf,
    capabilities: Capabilities,
    timeouts: Timeouts,
    /// The call-outs that it said not to support: it is not asked again.
    unsupported: Mutex<HashSet<&'static str>>,
}

impl Driver {
    /// Asks an executable what it can do.
    pub async fn init(name: DriverName, executable: PathBuf, timeouts: Timeouts) -> Result<Self, Error> {
        let reply = spawn(executable.clone(), Call::Init, timeouts.init).await?;
        let Some(reply) = reply else { return Err(Error::Required { call: "init" }) };
        let capabilities = reply.capabilities.unwrap_or_default();
        Ok(Self { name, executable, capabilities, timeouts, unsupported: Mutex::default() })
    }

    /// Has the driver do something; `None` if it does not support that, now or the first time it was asked.
    ///
    /// Each call runs in a thread of its own, so that drivers that hang keep nobody waiting but who called them. A call
    /// goes on to its end or its deadline when its future is dropped.
    pub async fn call(&self, call: Call) -> Result<Option<Reply>, Error> {
        let name = call.name();
        if self.unsupported.lock().contains(name) {
            return Ok(None);
        }
        let answer = spawn(self.executable.clone(), call, self.timeouts.call).await?;
        if answer.is_none() {
            self.unsupported.lock().insert(name);
        }
        Ok(answer)
    }

    /// Returns the name as it stands in objects.
    pub fn name(&self) -> &DriverName {
        &self.name
    }

    /// Returns what the driver said that it can do.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }
}

async fn spawn(executable: PathBuf, call: Call, timeout: Duration) -> Result<Option<Reply>, Error> {
    let name = call.name();
    let (sender, receiver) = oneshot::channel();
    let work = move || {
        let _ = sender.send(run(&executable, &call, timeout));
    };
    let not_run = |cause: String| Error::NotRun { call: name, cause };
    std::thread::Builder::new()
        .name(format!("flex {name}"))
        .spawn(work)
        .map_err(|error| not_run(format!("no thread for it: {error}")))?;
    receiver.await.unwrap_or_else(|_| Err(not_run("the thread that ran it panicked".to_owned())))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::*;
    use crate::options::Options;

    const MINUTE: Duration = Duration::from_secs(60);

    struct Script {
        directory: tempfile::TempDir,
    }

    impl Script {
        fn new(body: &str) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("driver");
            // Written under another name by a process that ends: who forks meanwhile cannot keep it open for writing.
            fs::write(directory.path().join("body"), format!("#!/bin/sh\n{body}\n")).unwrap();
            let copied = exec::run("cp", [directory.path().join("body"), path.clone()], MINUTE);
            copied.unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            Self { directory }
        }

        fn path(&self) -> PathBuf {
            self.directory.path().join("driver")
        }

        fn run(&self, call: &Call) -> Result<Option<Reply>, Error> {
            run(&self.path(), call, MINUTE)
        }
    }

    fn failure(body: &str) -> String {
        Script::new(body).run(&mount()).unwrap_err().to_string()
    }

    fn mount() -> Call {
        let options =
            Options::new(&BTreeMap::new(), "", false, "pv").unwrap().with_secret("p", b"open sesame");
        Call::Mount { directory: "/d".into(), options }
    }

    #[test]
    fn a_driver_gets_its_arguments_and_an_empty_input() {
        let script = Script::new(
            r#"cat; [ $# = 3 ] && [ "$1" = waitforattach ] && [ -z "$2" ] && echo "{\"status\":\"Success\",\"device\":\"$1\"}""#,
        );
        let options = Options::new(&BTreeMap::new(), "", false, "pv").unwrap();
        let reply = script.run(&Call::WaitForAttach { device: String::new(), options }).unwrap().unwrap();
        assert_eq!(reply.device.as_deref(), Some("waitforattach"));
    }

    #[test]
    fn an_exit_code_and_a_reply_must_agree() {
        for code in [0, 1] {
            let body = format!(r#"echo '{{"status":"Not supported"}}'; exit {code}"#);
            assert_eq!(Script::new(&body).run(&Call::Init).unwrap(), None);
            let body = format!(r#"echo '{{"status":"Failure","message":"no disk"}}'; exit {code}"#);
            assert_eq!(failure(&body), "mount command failed, status: Failure, reason: no disk");
        }
        assert_eq!(
            failure(r#"echo '{"status":"Success"}'; exit 7"#),
            "mount command failed: the driver ended with exit code 7 although its reply says Success"
        );
        assert_eq!(failure("echo '{}'"), "mount command failed, status: , reason: ");
        assert!(failure(r#"echo '{"status":"Success"}'; kill -9 $$"#).contains("ended with signal 9"));
    }

    #[test]
    fn a_driver_that_prints_no_reply_is_an_error_that_says_what_it_printed() {
        for (body, expected) in [
            ("exit 0", "the driver ended with exit code 0, and it printed nothing"),
            ("exit 3", "the driver ended with exit code 3, and it printed nothing"),
            ("no-such-tool", "exit code 127, and it printed what is not a JSON object"),
            ("printf '\\377'", "it printed what is not UTF-8"),
            (r#"echo '{"status":"Success"}'; echo '{"status":"Success"}'"#, "behind its JSON object"),
            (r#"echo '{"status":"Success"}'; echo warning >&2"#, "behind its JSON object: \"warning\""),
            ("head -c 3000000 /dev/zero | tr '\\0' x", "printed more than 1024 KiB, beginning with \"xxx"),
            (r#"echo '{"status":true}'"#, "field \"status\" of its reply is not a text"),
        ] {
            let error = failure(body);
            assert!(error.contains(expected), "{body}: {error}");
        }
    }

    #[test]
    fn secrets_that_a_driver_repeats_are_stripped() {
        let reply = r#"echo "{\"status\":\"Failure\",\"message\":\"bad password open sesame\"}""#;
        for body in ["echo \"$3\"; exit 1", "set -x; echo open sesame \"$@\"", reply] {
            let error = failure(body);
            assert!(!error.contains("sesame") && !error.contains("b3BlbiBzZXNhbWU"), "{error}");
        }
    }

    #[test]
    fn a_driver_that_hangs_is_killed_at_its_deadline() {
        let script = Script::new("sleep 1000 & sleep 1000");
        let error = run(&script.path(), &Call::Init, Duration::from_millis(300)).unwrap_err();
        assert!(error.is_interrupted());
        assert_eq!(
            error.to_string(),
            "init command failed: the driver did not answer within 300ms and was killed"
        );
    }

    #[test]
    fn an_executable_that_cannot_run_is_named_with_the_reason() {
        let script = Script::new("exit 0");
        fs::set_permissions(script.path(), fs::Permissions::from_mode(0o644)).unwrap();
        let error = script.run(&Call::Init).unwrap_err();
        assert!(error.is_unstarted() && error.to_string().contains("run chmod +x on it"), "{error}");
        fs::remove_file(script.path()).unwrap();
        let error = script.run(&Call::Init).unwrap_err().to_string();
        assert!(error.contains("/driver: No such file or directory"), "{error}");
    }

    #[tokio::test]
    async fn what_a_driver_does_not_support_is_asked_once() {
        let script = Script::new(
            r#"echo "$1" >> "$(dirname "$0")/calls"
               [ "$1" = init ] && echo '{"status":"Success","capabilities":{"attach":false}}' && exit
               echo '{"status":"Not supported"}'"#,
        );
        let name: DriverName = "a/driver".parse().unwrap();
        let driver = Driver::init(name, script.path(), Timeouts::default()).await.unwrap();
        assert!(!driver.capabilities().attach);
        for _ in 0..3 {
            assert_eq!(driver.call(mount()).await, Ok(None));
        }
        let calls = fs::read_to_string(script.directory.path().join("calls")).unwrap();
        assert_eq!(calls, "init\nmount\n");
    }
}

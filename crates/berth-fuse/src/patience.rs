//! What a mount does about a server that does not answer, as nfs(5) has it: `hard` waits, `soft` gives up.

use std::{future::Future, time::Duration};

use berth_core::Backoff;
use berth_nfs::{Error, Kind};
use rustix::io::Errno;
use tokio::time::{Instant, sleep, timeout};

/// The pauses between the attempts to reach a server that does not answer.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(50), longest: Duration::from_secs(2) };
/// One attempt may take so long, however long the mount waits altogether.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(10);

/// How long a call is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Patience {
    /// For ever if `None`.
    limit: Option<Duration>,
    /// The error that a caller then gets.
    errno: Errno,
    attempt: Duration,
}

/// A call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) errno: Errno,
    /// It was tried before, and perhaps done.
    pub(crate) repeated: bool,
}

impl From<Failure> for Errno {
    fn from(failure: Failure) -> Self {
        failure.errno
    }
}

impl Patience {
    /// Reads `hard`, `soft`, `softerr`, `timeo` and `retrans`; the last one counts. The error is a sentence.
    pub(crate) fn parse<'a>(options: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        // As the kernel's over TCP.
        let (mut tenths, mut retries) = (600_u32, 2_u32);
        let mut gives_up = None;
        for option in options {
            let number = |value: &str| {
                let number = value.parse().ok().filter(|number| (1..=6_000_000).contains(number));
                number.ok_or_else(|| format!("{option} is no number that makes sense there"))
            };
            match option.split_once('=') {
                None if option == "hard" => gives_up = None,
                None if option == "soft" => gives_up = Some(Errno::IO),
                None if option == "softerr" => gives_up = Some(Errno::TIMEDOUT),
                Some(("timeo", value)) => tenths = number(value)?,
                Some(("retrans", "0")) => retries = 0,
                Some(("retrans", value)) => retries = number(value)?,
                _ => {}
            }
        }
        let once = Duration::from_millis(u64::from(tenths) * 100);
        Ok(Self {
            limit: gives_up.map(|_| once.saturating_mul(retries.saturating_add(1))),
            errno: gives_up.unwrap_or(Errno::IO),
            attempt: once.min(LONGEST_ATTEMPT),
        })
    }

    /// How long a server may be silent before an attempt has failed.
    pub(crate) fn attempt(&self) -> Duration {
        self.attempt
    }

    /// Bounds whatever may wait for the server.
    pub(crate) async fn bound<T>(&self, work: impl Future<Output = Result<T, Errno>>) -> Result<T, Errno> {
        match self.limit {
            None => work.await,
            Some(limit) => timeout(limit, work).await.unwrap_or(Err(self.errno)),
        }
    }

    /// Asks until there is an answer, or for as long as the mount waits.
    pub(crate) async fn ask<T, F>(&self, mut call: impl FnMut() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let begun = Instant::now();
        let mut failures = 0;
        loop {
            let repeated = failures > 0;
            let left = self.limit.map(|limit| limit.saturating_sub(begun.elapsed()));
            let outcome = match left {
                None => call().await,
                Some(left) => match timeout(left, call()).await {
                    Ok(outcome) => outcome,
                    Err(_) => return Err(Failure { errno: self.errno, repeated }),
                },
            };
            let error = match outcome {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            if !is_absence(&error) {
                return Err(Failure { errno: errno(&error), repeated });
            }
            failures += 1;
            let pause = BACKOFF.pause(failures);
            if left.is_some_and(|left| left < pause) {
                return Err(Failure { errno: self.errno, repeated });
            }
            sleep(pause).await;
        }
    }
}

/// Whether the server was not there, so that it may be asked again.
pub(crate) fn is_absence(error: &Error) -> bool {
    matches!(error.kind(), Kind::Unreachable | Kind::Interrupted)
}

/// The error that a program gets.
pub(crate) fn errno(error: &Error) -> Errno {
    match error.status() {
        Some(1) => return Errno::PERM,
        Some(6) => return Errno::NXIO,
        Some(18) => return Errno::XDEV,
        Some(19) => return Errno::NODEV,
        Some(27) => return Errno::FBIG,
        Some(31) => return Errno::MLINK,
        Some(63) => return Errno::NAMETOOLONG,
        Some(10029) => return Errno::LOOP,
        Some(10012 | 10015 | 10046) => return Errno::BUSY,
        Some(10095) => return Errno::NODATA,
        Some(10096) => return Errno::TOOBIG,
        _ => {}
    }
    match error.kind() {
        Kind::NotFound => Errno::NOENT,
        Kind::Exists => Errno::EXIST,
        Kind::NotEmpty => Errno::NOTEMPTY,
        Kind::NotDirectory => Errno::NOTDIR,
        Kind::IsDirectory => Errno::ISDIR,
        Kind::NoSpace => Errno::NOSPC,
        Kind::Quota => Errno::DQUOT,
        Kind::ReadOnly => Errno::ROFS,
        Kind::Permission => Errno::ACCESS,
        Kind::Stale => Errno::STALE,
        Kind::Invalid => Errno::INVAL,
        Kind::Unsupported => Errno::OPNOTSUPP,
        Kind::Unreachable => Errno::TIMEDOUT,
        Kind::Interrupted | Kind::Protocol | Kind::Io => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &str) -> Patience {
        Patience::parse(options.split(',')).unwrap()
    }

    #[test]
    fn a_mount_is_as_patient_as_its_options_say() {
        assert_eq!(parse("").limit, None);
        assert_eq!(parse("soft,hard,timeo=10").limit, None);
        let soft = parse("soft,timeo=50,retrans=3");
        assert_eq!((soft.limit, soft.errno), (Some(Duration::from_secs(20)), Errno::IO));
        assert_eq!(soft.attempt(), Duration::from_secs(5));
        let usual = parse("softerr");
        assert_eq!((usual.limit, usual.errno), (Some(Duration::from_secs(180)), Errno::TIMEDOUT));
        assert_eq!(usual.attempt(), LONGEST_ATTEMPT);
        assert_eq!(parse("soft,retrans=0,timeo=1").limit, Some(Duration::from_millis(100)));
        for bad in ["timeo=0", "timeo=soon", "retrans=-1", "timeo=99999999"] {
            assert!(Patience::parse([bad]).unwrap_err().starts_with(bad), "{bad}");
        }
    }
}

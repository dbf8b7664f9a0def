//! The shares this process knows, and how each is reached.
//!
//! A call names a share by a class, an id or a context; what it says about reaching it (mount options, perhaps from a
//! secret) is remembered for the calls that say nothing, such as a deletion. Nothing here outlives the process, and
//! nothing needs to.

use std::{
    collections::BTreeMap,
    error::Error as _,
    time::{Duration, Instant},
};

use berth_nfs::{Entry, Kind, Nfs, Options, Share, Target};
use parking_lot::{Mutex, MutexGuard};

use super::{id::ShareName, parameters::check_secret_options};
use crate::backend::{Error, Result};

/// How long a share that was reached is taken to be there, without a word to its server: a call reaches it several
/// times, and many calls come at once. Short enough that nobody meets a server that came back with other handles.
const FRESH: Duration = Duration::from_millis(20);
/// How long leftovers that could not be removed are left alone.
const PAUSE: Duration = Duration::from_secs(5);

/// How shares are reached.
#[derive(Debug)]
pub(super) struct Shares {
    nfs: Nfs,
    /// The options of a share that none is known of.
    default_options: Vec<String>,
    known: Mutex<BTreeMap<ShareName, Known>>,
}

#[derive(Clone, Default)]
struct Known {
    options: Vec<String>,
    /// Options out of a secret, which count besides.
    secret: Vec<String>,
    /// It has answered, or was named at the start: worth a listing.
    is_there: bool,
    /// As it was reached last.
    open: Option<(Instant, Share)>,
    /// What an earlier process may have left there was looked at.
    swept: bool,
    /// Something is left there again, since the server went away in the middle: when to look next.
    left: Option<Instant>,
}

/// Options may come from a secret.
impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Known").field("swept", &self.swept).finish_non_exhaustive()
    }
}

impl Shares {
    /// Those that are known from the start.
    pub(super) fn new(shares: &[ShareName], default_options: Vec<String>) -> Self {
        let there = || Known { is_there: true, ..Known::default() };
        let known = shares.iter().map(|share| (share.clone(), there())).collect();
        Self { nfs: Nfs::new(), default_options, known: Mutex::new(known) }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<ShareName, Known>> {
        self.known.lock()
    }

    /// Remembers how a share is reached; nothing said changes nothing.
    pub(super) fn learn(&self, share: &ShareName, options: Vec<String>) {
        let mut known = self.known();
        let known = known.entry(share.clone()).or_default();
        if !options.is_empty() && known.options != options {
            known.options = options;
            known.open = None;
        }
    }

    /// Remembers what a secret says about reaching a share.
    pub(super) fn learn_secret(&self, share: &ShareName, options: Vec<String>) {
        let mut known = self.known();
        let known = known.entry(share.clone()).or_default();
        if known.secret != options {
            known.secret = options;
            known.open = None;
        }
    }

    /// Every share there is, in an order that stays the same when more of them become known.
    pub(super) fn all(&self) -> Vec<ShareName> {
        let known = self.known();
        let mut all: Vec<ShareName> =
            known.iter().filter(|(_, known)| known.is_there).map(|(share, _)| share.clone()).collect();
        all.sort_by_cached_key(ShareName::key);
        all
    }

    /// Whether leftovers are to be looked for: the first time that it is asked, and after something was left.
    pub(super) fn is_to_be_swept(&self, share: &ShareName) -> bool {
        let mut known = self.known();
        let known = known.entry(share.clone()).or_default();
        if known.swept && known.left.is_none_or(|due| due > Instant::now()) {
            return false;
        }
        known.swept = true;
        known.left = None;
        true
    }

    /// Remembers that something may be left on a share that should not be: whoever comes next removes it.
    pub(super) fn note_leftovers(&self, share: &ShareName) {
        self.known().entry(share.clone()).or_default().left = Some(Instant::now() + PAUSE);
    }

    /// Reaches a share.
    pub(super) async fn open(&self, name: &ShareName) -> Result<Share> {
        let known = self.known().get(name).cloned().unwrap_or_default();
        if let Some((_, share)) = known.open.filter(|(since, _)| since.elapsed() < FRESH) {
            return Ok(share);
        }
        check_secret_options(&known.secret)?;
        let options = [known.options, known.secret].concat();
        let options = if options.is_empty() { &self.default_options } else { &options };
        let options =
            Options::parse(options).map_err(|error| Error::Invalid(format!("mountOptions: {error}")))?;
        let target = Target { server: name.server.clone(), path: name.path(), options };
        target.check().map_err(|error| Error::Invalid(error.to_string()))?;
        let share = self.nfs.share(&target).await.map_err(failed)?;
        let mut known = self.known();
        let known = known.entry(name.clone()).or_default();
        known.is_there = true;
        known.open = Some((Instant::now(), share.clone()));
        Ok(share)
    }
}

/// What the server said, as the caller is to hear it.
#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` hands over")]
pub(super) fn failed(error: berth_nfs::Error) -> Error {
    let reason = error.source().map(|reason| format!(": {reason}")).unwrap_or_default();
    let sentence = format!("{error}{reason}{}", advice(&error));
    match error.kind() {
        Kind::NoSpace | Kind::Quota => Error::Exhausted(sentence),
        Kind::Unreachable | Kind::Interrupted | Kind::Stale => Error::Unavailable(sentence),
        Kind::Permission => Error::Denied(sentence),
        Kind::ReadOnly => Error::Precondition(sentence),
        Kind::NotFound
        | Kind::Exists
        | Kind::NotEmpty
        | Kind::NotDirectory
        | Kind::IsDirectory
        | Kind::Invalid
        | Kind::Unsupported
        | Kind::Protocol
        | Kind::Io => Error::State(sentence),
    }
}

/// What somebody can do about it.
fn advice(error: &berth_nfs::Error) -> &'static str {
    const NO_SPACE: u32 = 28;
    match error.kind() {
        Kind::NoSpace if error.status() == Some(NO_SPACE) => "; make room there, or the filesystem larger",
        Kind::Quota => "; make room there, or raise the quota",
        Kind::ReadOnly => "; let the server export it with the option `rw`",
        Kind::Unreachable | Kind::Interrupted => "; see whether the server runs, and repeat the call",
        Kind::Stale => "; repeat the call, which looks the share up again",
        _ => "",
    }
}

/// A directory below a share, if it is there; a symbolic link is none.
pub(super) async fn find_dir(share: &Share, path: &str) -> Result<Option<Entry>> {
    let first = share.open_dir(path).await;
    // A server may remember a directory that was removed behind its back, and notices when it is asked for it.
    match first {
        Err(error) if error.kind() == Kind::Stale => found(share.open_dir(path).await),
        answer => found(answer),
    }
}

/// Turns what is not there into `None`.
pub(super) fn found<T>(answer: berth_nfs::Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), Kind::NotFound | Kind::NotDirectory) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

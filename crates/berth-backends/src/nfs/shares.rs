//! The shares that the controller's side knows, and how each is reached.
//!
//! A call says by its class and its secret how a share is reached ([`Reach`]), and nothing that another call says changes
//! that. What a call has said is remembered for calls that say nothing, such as a listing. Nothing here outlives the
//! process, and nothing needs to.

use std::{
    collections::BTreeMap,
    error::Error as _,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use berth_nfs::{Entry, Kind, Metrics, Nfs, Options, Share, Target};
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

use super::{
    allowed::AllowedServers,
    id::{ShareName, SubPath},
    parameters::{check_secret_options, secret_options},
};
use crate::{Context, Error, Result};

/// How long leftovers that could not be removed are left alone.
const LEFTOVERS_RETRY_AFTER: Duration = Duration::from_secs(5);

/// How a call says that a share is reached.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Reach {
    /// The mount options of the class; `None` where the call names no class.
    class: Option<Vec<String>>,
    /// The mount options in the call's secret, which count besides.
    secret: Vec<String>,
}

impl Reach {
    /// For a call that names a class with these mount options.
    pub(super) fn by_class(options: Vec<String>, ctx: &Context) -> Self {
        Self { class: Some(options), secret: secret_options(ctx) }
    }

    /// For a call that says no more than an id, and perhaps a secret.
    pub(super) fn by_id(ctx: &Context) -> Self {
        Self { class: None, secret: secret_options(ctx) }
    }

    /// For a call that names no volume, and for other shares than the one that a call is about.
    pub(super) const fn unsaid() -> Self {
        Self { class: None, secret: Vec::new() }
    }
}

impl fmt::Debug for Reach {
    // Options may come from a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reach").finish_non_exhaustive()
    }
}

/// The shares that were reached, or were named at the start.
#[derive(Debug)]
pub(super) struct Shares {
    nfs: Nfs,
    /// The options of a share that none is known of.
    default_options: Vec<String>,
    allowed: AllowedServers,
    known: Mutex<BTreeMap<ShareName, KnownShare>>,
}

#[derive(Debug, Default)]
struct KnownShare {
    /// How it was reached last, by a call that said it.
    reach: Reach,
    /// Whether it has answered, or was named at the start, so that it belongs to a listing.
    is_listed: bool,
    /// Whether what an earlier process may have left there was checked.
    swept: bool,
    /// Whether the index of directories is known to be complete.
    indexed: bool,
    /// The shares around it that answered when they were first asked for, with the directory that this one is there.
    around: Option<Vec<(ShareName, SubPath)>>,
    /// Held by whoever decides about directories that volumes may share.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// When to check next for what is left there, since the server went away in the middle.
    sweep_due: Option<Instant>,
}

impl Shares {
    /// Those that are known from the start.
    pub(super) fn new(shares: &[ShareName], default_options: Vec<String>, allowed: AllowedServers) -> Self {
        let listed = || KnownShare { is_listed: true, ..KnownShare::default() };
        let known = shares.iter().map(|share| (share.clone(), listed())).collect();
        Self { nfs: Nfs::new(), default_options, allowed, known: Mutex::new(known) }
    }

    /// How the servers answer.
    pub(super) fn metrics(&self) -> &Metrics {
        self.nfs.metrics()
    }

    /// Every share there is, in an order that stays the same when more of them become known.
    pub(super) fn all(&self) -> Vec<ShareName> {
        let known = self.known.lock();
        let mut all: Vec<ShareName> =
            known.iter().filter(|(_, known)| known.is_listed).map(|(share, _)| share.clone()).collect();
        all.sort_by_cached_key(ShareName::key);
        all
    }

    /// Whether leftovers are to be searched for: the first time that it is asked, and after something was left.
    pub(super) fn is_to_be_swept(&self, share: &ShareName) -> bool {
        let mut known = self.known.lock();
        let known = known.entry(share.clone()).or_default();
        if known.swept && known.sweep_due.is_none_or(|due| due > Instant::now()) {
            return false;
        }
        known.swept = true;
        known.sweep_due = None;
        true
    }

    /// Remembers that something may be left on a share that should not be: whoever comes next removes it.
    pub(super) fn note_leftovers(&self, share: &ShareName) {
        let due = Instant::now() + LEFTOVERS_RETRY_AFTER;
        self.known.lock().entry(share.clone()).or_default().sweep_due = Some(due);
    }

    /// Whether the index of a share's directories was found complete.
    pub(super) fn is_indexed(&self, share: &ShareName) -> bool {
        self.known.lock().get(share).is_some_and(|known| known.indexed)
    }

    /// Remembers that the index of a share's directories is complete.
    pub(super) fn note_indexed(&self, share: &ShareName) {
        self.known.lock().entry(share.clone()).or_default().indexed = true;
    }

    /// The known shares that lie in this one, as directories of it.
    pub(super) fn below(&self, share: &ShareName) -> Vec<SubPath> {
        self.known.lock().keys().filter_map(|other| share.directory_of(other)).collect()
    }

    /// The shares around this one, with the directory that it is there. The server is asked once which there are; those that become
    /// known later are added.
    pub(super) async fn around(&self, share: &ShareName) -> Vec<(ShareName, SubPath)> {
        let asked = self.known.lock().get(share).and_then(|known| known.around.clone());
        let mut around = if let Some(around) = asked { around } else { self.ask_around(share).await };
        for other in self.all() {
            if let Some(below) = other.directory_of(share)
                && !around.iter().any(|(outer, _)| *outer == other)
            {
                around.push((other, below));
            }
        }
        around
    }

    /// Asks the server which shares there are around this one, and remembers it if the server said it of all of them.
    async fn ask_around(&self, share: &ShareName) -> Vec<(ShareName, SubPath)> {
        let reach = self.completed(share, &Reach::unsaid());
        let (mut around, mut is_sure) = (Vec::new(), true);
        for (outer, below) in share.around() {
            match self.reach(&outer, &reach).await {
                Ok(_) => around.push((outer, below)),
                Err(Error::Unavailable(_)) => is_sure = false,
                // Most servers export no such share, and say so.
                Err(_) => {}
            }
        }
        if is_sure {
            self.known.lock().entry(share.clone()).or_default().around = Some(around.clone());
        }
        around
    }

    /// Waits for one's turn to decide about directories that volumes of a share may have in common.
    pub(super) async fn take_turn(&self, share: &ShareName) -> OwnedMutexGuard<()> {
        let turn = self.known.lock().entry(share.clone()).or_default().turn.clone();
        turn.lock_owned().await
    }

    /// Reaches a share: on a connection that all have who say the same, with a request that finds its root.
    pub(super) async fn open(&self, name: &ShareName, reach: &Reach) -> Result<Share> {
        let (share, said) = self.reach(name, reach).await?;
        let mut known = self.known.lock();
        let known = known.entry(name.clone()).or_default();
        known.is_listed = true;
        if let Some(reach) = said {
            known.reach = reach;
        }
        Ok(share)
    }

    /// The same without remembering it; also how it was reached, if that was said.
    async fn reach(&self, name: &ShareName, reach: &Reach) -> Result<(Share, Option<Reach>)> {
        self.allowed.check(&name.server)?;
        check_secret_options(&reach.secret)?;
        let reach = self.completed(name, reach);
        let options = [reach.class.as_deref().unwrap_or_default(), &reach.secret].concat();
        self.allowed.check_options(&options)?;
        let is_said = !options.is_empty();
        let options = Options::parse(if is_said { &options } else { &self.default_options })
            .map_err(|error| Error::Invalid(format!("mountOptions: {error}")))?;
        let target = Target { server: name.server.clone(), path: name.path(), options };
        target.check().map_err(|error| Error::Invalid(error.to_string()))?;
        let share = self.nfs.share(&target).await.map_err(failed)?;
        Ok((share, is_said.then_some(reach)))
    }

    /// Reaches a share around another, by that one's options unless its own are known; nothing if the server has none.
    pub(super) async fn open_around(&self, outer: &ShareName, inner: &ShareName) -> Result<Option<Share>> {
        let own = self
            .known
            .lock()
            .get(outer)
            .map(|known| known.reach.clone())
            .filter(|own| *own != Reach::unsaid());
        let reach = own.unwrap_or_else(|| self.completed(inner, &Reach::unsaid()));
        match self.reach(outer, &reach).await {
            Ok((share, _)) => Ok(Some(share)),
            Err(error @ Error::Unavailable(_)) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// How a share is reached by a call that may not say all of it.
    fn completed(&self, name: &ShareName, said: &Reach) -> Reach {
        if said.class.is_some() {
            return said.clone();
        }
        let known = self.known.lock().get(name).map(|known| known.reach.clone()).unwrap_or_default();
        if said.secret.is_empty() { known } else { Reach { class: known.class, secret: said.secret.clone() } }
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

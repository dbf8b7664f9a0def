//! The drivers of a plugin directory, as they come, change and go.
//!
//! A driver is `vendor~driver/driver`. Its directory must be a real one, the executable may be a link; names that begin
//! with a dot are ignored, so that a driver can be written under one and renamed. Each driver that comes, and each
//! whose executable changed, is asked `init` again in the background: one that hangs keeps nobody waiting.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use berth_core::Backoff;
use parking_lot::Mutex;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::driver::{Driver, Timeouts};
use crate::name::DriverName;

/// When `init` failed, it is tried again after this; at once when the executable changes.
const INIT_RETRY: Backoff = Backoff { first: Duration::from_millis(500), longest: Duration::from_secs(60) };
/// How often a plugin directory is tried again that cannot be made or watched.
const DIRECTORY_RETRY: Duration = Duration::from_secs(10);

/// The drivers of one plugin directory; cheap to clone.
#[derive(Clone)]
pub struct Drivers {
    shared: Arc<Shared>,
}

struct Shared {
    directory: PathBuf,
    timeouts: Timeouts,
    entries: Mutex<HashMap<DriverName, Entry>>,
    /// Why there are no drivers at all.
    problem: Mutex<Option<String>>,
    changed: watch::Sender<u64>,
}

/// A driver's executable, and what is known of it.
struct Entry {
    identity: Identity,
    /// The latest that answered `init`, also while a newer one is asked.
    driver: Option<Arc<Driver>>,
    problem: Option<String>,
}

/// What makes one executable of a name another one than the next.
type Identity = (u64, u64, u32, i64, i64, i64, i64);

impl Drivers {
    /// Begins to watch a directory, until the shutdown. It is made if it does not exist.
    ///
    /// Must be called within a tokio runtime.
    pub fn watch(directory: impl Into<PathBuf>, timeouts: Timeouts, shutdown: CancellationToken) -> Self {
        let shared = Arc::new(Shared {
            directory: directory.into(),
            timeouts,
            entries: Mutex::default(),
            problem: Mutex::default(),
            changed: watch::channel(0).0,
        });
        tokio::spawn({
            let shared = shared.clone();
            async move {
                let _ = shutdown.run_until_cancelled(shared.follow()).await;
            }
        });
        Self { shared }
    }

    /// The driver of this name, or why there is none.
    pub fn get(&self, name: &DriverName) -> Result<Arc<Driver>, String> {
        let entries = self.shared.entries.lock();
        let path = name.path_below(&self.shared.directory);
        let Some(entry) = entries.get(name) else {
            let why = self.shared.problem.lock().clone();
            let why = why.unwrap_or_else(|| "is it installed on this node?".to_owned());
            return Err(format!(
                "no volume plugin matched: FlexVolume driver {name} has no executable {}; {why}",
                path.display()
            ));
        };
        entry.driver.clone().ok_or_else(|| match &entry.problem {
            Some(problem) => format!("FlexVolume driver {name} ({}): {problem}", path.display()),
            None => {
                format!("FlexVolume driver {name} ({}) has not answered init yet", path.display())
            }
        })
    }

    /// Returns when a driver has come, changed or gone after this call was made.
    pub fn changed(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut changes = self.shared.changed.subscribe();
        async move {
            // The sender lives with the drivers, which whoever waits here holds.
            let _ = changes.changed().await;
        }
    }

    /// Returns the names of the drivers that answered `init`.
    pub fn names(&self) -> Vec<DriverName> {
        let entries = self.shared.entries.lock();
        let mut names: Vec<DriverName> = entries
            .iter()
            .filter(|(_, entry)| entry.driver.is_some())
            .map(|(name, _)| name.clone())
            .collect();
        names.sort();
        names
    }
}

impl Shared {
    /// Keeps the entries as the directory is, for ever.
    async fn follow(self: Arc<Self>) {
        loop {
            let watched = fs::create_dir_all(&self.directory).and_then(|()| Inotify::new());
            match watched {
                Ok(mut inotify) => {
                    self.problem.lock().take();
                    if let Err(error) = self.follow_with(&mut inotify).await {
                        self.unreadable(&error);
                    }
                }
                Err(error) => self.unreadable(&error),
            }
            tokio::time::sleep(DIRECTORY_RETRY).await;
        }
    }

    fn unreadable(&self, error: &io::Error) {
        let directory = self.directory.display();
        tracing::warn!(%directory, %error, "no FlexVolume drivers: the plugin directory cannot be watched; trying again");
        *self.problem.lock() = Some(format!("the plugin directory {directory} cannot be watched: {error}"));
        self.notify();
    }

    /// Returns when the directory itself is gone, and must be made and watched again.
    async fn follow_with(self: &Arc<Self>, inotify: &mut Inotify) -> io::Result<()> {
        let mut events = Events::default();
        loop {
            inotify.add(&self.directory)?;
            for name in directories(&self.directory)? {
                // It may be gone again by now; then its parent has an event.
                let _ = inotify.add(&self.directory.join(name.directory()));
            }
            // Only now, so that nothing can come unnoticed into a directory that was not watched yet.
            let found = directories(&self.directory)?.into_iter().filter_map(|name| {
                let identity = identity(&name.path_below(&self.directory))?;
                Some((name, identity))
            });
            self.take(found.collect(), &events.touched);
            events = inotify.next().await?;
            if events.gone && !self.directory.exists() {
                self.take(BTreeMap::new(), &HashSet::new());
                fs::create_dir_all(&self.directory)?;
            }
        }
    }

    /// Makes the entries those of what was found. `touched` are executables that something happened to.
    fn take(self: &Arc<Self>, found: BTreeMap<DriverName, Identity>, touched: &HashSet<PathBuf>) {
        let mut begin = Vec::new();
        {
            let mut entries = self.entries.lock();
            let before = entries.len();
            entries.retain(|name, _| {
                let stays = found.contains_key(name);
                if !stays {
                    tracing::info!(driver = %name, "FlexVolume driver is gone");
                }
                stays
            });
            if entries.len() < before {
                self.notify();
            }
            for (name, identity) in found {
                let path = name.path_below(&self.directory);
                match entries.get_mut(&name) {
                    Some(entry) if entry.identity == identity => {
                        // One that could not be run, as it was still being written, may be run now.
                        if entry.problem.is_some() && touched.contains(&path) {
                            begin.push((name, identity));
                        }
                    }
                    Some(entry) => {
                        entry.identity = identity;
                        begin.push((name, identity));
                    }
                    None => {
                        entries.insert(name.clone(), Entry { identity, driver: None, problem: None });
                        begin.push((name, identity));
                    }
                }
            }
        }
        for (name, identity) in begin {
            tokio::spawn(self.clone().init(name, identity));
        }
    }

    /// Asks an executable what it can do, until it says so, or is another one.
    async fn init(self: Arc<Self>, name: DriverName, identity: Identity) {
        let mut failures = 0;
        loop {
            let executable = name.path_below(&self.directory);
            let asked = Driver::init(name.clone(), executable, self.timeouts).await;
            {
                let mut entries = self.entries.lock();
                let Some(entry) = entries.get_mut(&name).filter(|entry| entry.identity == identity) else {
                    return;
                };
                match asked {
                    Ok(driver) => {
                        tracing::info!(driver = %name, capabilities = ?driver.capabilities(), "FlexVolume driver");
                        entry.driver = Some(Arc::new(driver));
                        entry.problem = None;
                        drop(entries);
                        self.notify();
                        return;
                    }
                    Err(error) => {
                        let problem = error.to_string();
                        if entry.problem.as_deref() != Some(&problem) {
                            tracing::warn!(driver = %name, error = problem, "FlexVolume driver does not answer init; trying again");
                            entry.problem = Some(problem);
                            drop(entries);
                            self.notify();
                        }
                    }
                }
            }
            failures += 1;
            tokio::time::sleep(INIT_RETRY.exact_pause(failures)).await;
            // Somebody else may have asked it meanwhile, as something happened to it.
            let entries = self.entries.lock();
            if entries.get(&name).is_none_or(|entry| entry.identity != identity || entry.problem.is_none()) {
                return;
            }
        }
    }

    fn notify(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}

/// The drivers that have a directory in a plugin directory, whether or not their executables are there.
fn directories(directory: &Path) -> io::Result<Vec<DriverName>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let file_name = entry.file_name();
        let Some(text) = file_name.to_str().filter(|text| !text.starts_with('.')) else { continue };
        // Not followed: a link could lead anywhere.
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        match DriverName::from_directory(text) {
            Ok(name) => found.push(name),
            Err(error) => {
                tracing::debug!(path = %entry.path().display(), %error, "no FlexVolume driver");
            }
        }
    }
    Ok(found)
}

fn identity(executable: &Path) -> Option<Identity> {
    let found = fs::metadata(executable).ok().filter(fs::Metadata::is_file)?;
    let (mtime, ctime) = ((found.mtime(), found.mtime_nsec()), (found.ctime(), found.ctime_nsec()));
    Some((found.dev(), found.ino(), found.mode(), mtime.0, mtime.1, ctime.0, ctime.1))
}

/// What happened in watched directories.
#[derive(Default)]
struct Events {
    /// A watched directory is gone.
    gone: bool,
    touched: HashSet<PathBuf>,
}

struct Inotify {
    descriptor: AsyncFd<OwnedFd>,
    watched: HashMap<i32, PathBuf>,
}

impl Inotify {
    fn new() -> io::Result<Self> {
        let descriptor = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        #[expect(
            deprecated,
            reason = "its successor is unsafe for types that could give up their descriptor; OwnedFd cannot"
        )]
        let descriptor = AsyncFd::new(descriptor)?;
        Ok(Self { descriptor, watched: HashMap::new() })
    }

    fn add(&mut self, directory: &Path) -> io::Result<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR
            | WatchFlags::DONT_FOLLOW;
        let number = inotify::add_watch(self.descriptor.get_ref(), directory, flags)?;
        self.watched.insert(number, directory.to_owned());
        Ok(())
    }

    async fn next(&mut self) -> io::Result<Events> {
        loop {
            let mut ready = self.descriptor.readable().await?;
            match ready.try_io(|descriptor| read(descriptor.get_ref(), &self.watched)) {
                Ok(events) => return events,
                Err(_would_block) => {}
            }
        }
    }
}

fn read(descriptor: &OwnedFd, watched: &HashMap<i32, PathBuf>) -> io::Result<Events> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(descriptor, &mut buffer);
    let mut events = Events::default();
    let mut some = false;
    loop {
        match reader.next() {
            Ok(event) => {
                some = true;
                events.gone |= event
                    .events()
                    .intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::IGNORED);
                let name = event.file_name().and_then(|name| name.to_str().ok());
                if let (Some(directory), Some(name)) = (watched.get(&event.wd()), name) {
                    events.touched.insert(directory.join(name));
                }
            }
            Err(_) if some => return Ok(events),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    struct Plugins {
        directory: tempfile::TempDir,
        drivers: Drivers,
        _ends: tokio_util::sync::DropGuard,
    }

    impl Plugins {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let shutdown = CancellationToken::new();
            let timeouts = Timeouts { init: LONG, call: LONG };
            let drivers = Drivers::watch(directory.path().join("made/plugins"), timeouts, shutdown.clone());
            Self { directory, drivers, _ends: shutdown.drop_guard() }
        }

        fn top(&self) -> PathBuf {
            self.directory.path().join("made/plugins")
        }

        /// Writes an executable under a hidden name and renames it, as an installer should.
        fn install(&self, directory: &str, executable: &str, attach: bool) {
            let directory = self.top().join(directory);
            fs::create_dir_all(&directory).unwrap();
            let hidden = directory.join(".new");
            let reply = format!(r#"{{"status":"Success","capabilities":{{"attach":{attach}}}}}"#);
            fs::write(&hidden, format!("#!/bin/sh\necho '{reply}'\n")).unwrap();
            fs::set_permissions(&hidden, fs::Permissions::from_mode(0o755)).unwrap();
            fs::rename(hidden, directory.join(executable)).unwrap();
        }

        /// Waits until what is known of a driver is as it should be.
        async fn until(&self, name: &str, wanted: impl Fn(&Result<Arc<Driver>, String>) -> bool) {
            let name: DriverName = name.parse().unwrap();
            let reached = async {
                loop {
                    let changed = self.drivers.changed();
                    if wanted(&self.drivers.get(&name)) {
                        return;
                    }
                    changed.await;
                }
            };
            let timely = tokio::time::timeout(LONG, reached).await;
            assert!(timely.is_ok(), "{name}: {:?}", self.drivers.get(&name));
        }
    }

    fn is_attachable(driver: &Result<Arc<Driver>, String>) -> Option<bool> {
        driver.as_ref().ok().map(|driver| driver.capabilities().attach)
    }

    #[tokio::test]
    async fn drivers_come_change_and_go() {
        let plugins = Plugins::new();
        plugins.until("a/d", |driver| matches!(driver, Err(why) if why.contains("no executable"))).await;
        plugins.install("a~d", "d", true);
        plugins.until("a/d", |driver| is_attachable(driver) == Some(true)).await;
        plugins.install("a~d", "d", false);
        plugins.until("a/d", |driver| is_attachable(driver) == Some(false)).await;
        plugins.install("plain", "plain", false);
        plugins.until("plain", |driver| is_attachable(driver) == Some(false)).await;
        assert_eq!(
            plugins.drivers.names().iter().map(DriverName::as_str).collect::<Vec<_>>(),
            ["a/d", "plain"]
        );
        fs::remove_file(plugins.top().join("a~d/d")).unwrap();
        plugins.until("a/d", Result::is_err).await;
        fs::remove_dir_all(plugins.top()).unwrap();
        plugins.until("plain", Result::is_err).await;
        plugins.install("plain", "plain", true);
        plugins.until("plain", |driver| is_attachable(driver) == Some(true)).await;
    }

    #[tokio::test]
    async fn an_executable_that_is_written_in_place_is_asked_until_it_answers() {
        let plugins = Plugins::new();
        plugins.install("first~d", "d", false);
        plugins.until("first/d", Result::is_ok).await;
        let directory = plugins.top().join("slow~d");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("d"), "#!/bin/sh\necho '{\"status\":\"Success\"}'\n").unwrap();
        plugins.until("slow/d", |driver| matches!(driver, Err(why) if why.contains("chmod +x"))).await;
        fs::set_permissions(directory.join("d"), fs::Permissions::from_mode(0o755)).unwrap();
        plugins.until("slow/d", |driver| is_attachable(driver) == Some(true)).await;
    }

    #[tokio::test]
    async fn an_executable_that_comes_long_after_its_directory_is_found() {
        let plugins = Plugins::new();
        fs::create_dir_all(plugins.top().join("late~d")).unwrap();
        plugins.install("z~last", "last", false);
        plugins.until("z/last", Result::is_ok).await;
        plugins.install("late~d", "d", false);
        plugins.until("late/d", Result::is_ok).await;
    }

    #[tokio::test]
    async fn links_hidden_names_and_names_that_are_none_are_left_alone() {
        let plugins = Plugins::new();
        plugins.install("a~real", "real", false);
        plugins.install(".hidden~d", "d", false);
        plugins.install("UPPER~d", "d", false);
        plugins.install("a~b~c", "c", false);
        plugins.install("a~other", "real", false);
        std::os::unix::fs::symlink(plugins.top().join("a~real"), plugins.top().join("b~real")).unwrap();
        plugins.install("z~last", "last", false);
        plugins.until("z/last", Result::is_ok).await;
        plugins.until("a/real", Result::is_ok).await;
        let names = plugins.drivers.names();
        assert_eq!(names.iter().map(DriverName::as_str).collect::<Vec<_>>(), ["a/real", "z/last"]);
    }

    #[tokio::test]
    async fn a_directory_that_cannot_be_made_is_named() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("file"), "").unwrap();
        let shutdown = CancellationToken::new();
        let top = directory.path().join("file/plugins");
        let drivers = Drivers::watch(&top, Timeouts::default(), shutdown.clone());
        let name: DriverName = "a/d".parse().unwrap();
        while !drivers.get(&name).is_err_and(|why| why.contains("cannot be watched")) {
            tokio::time::timeout(LONG, drivers.changed()).await.expect("the directory's problem is told");
        }
        shutdown.cancel();
    }
}

//! A server whose answers are not to be trusted: Ganesha's, damaged or forged on their way to us.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use berth_nfs::{Change, Cookie, Create, Error, Kind, Name, Nfs, Node, Share, Target, Version};
use bytes::Bytes;
use futures_util::future::join_all;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Mutex, Notify},
    time::timeout,
};

use super::server::{Server, chain};

const LAST_FRAGMENT: u32 = 1 << 31;

/// What happens to a record on its way; `None` lets it pass, and requests may be answered at once instead.
trait Meddle: Send + Sync + 'static {
    fn request(&self, _record: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn answer(&self, record: Vec<u8>) -> Vec<u8> {
        record
    }
}

async fn record(from: &mut OwnedReadHalf) -> std::io::Result<Vec<u8>> {
    let mut record = Vec::new();
    loop {
        let header = from.read_u32().await?;
        let start = record.len();
        record.resize(start + (header & !LAST_FRAGMENT) as usize, 0);
        from.read_exact(&mut record[start..]).await?;
        if header & LAST_FRAGMENT != 0 {
            return Ok(record);
        }
    }
}

async fn send(to: &Mutex<OwnedWriteHalf>, record: &[u8]) -> std::io::Result<()> {
    let mut whole = (u32::try_from(record.len()).unwrap() | LAST_FRAGMENT).to_be_bytes().to_vec();
    whole.extend_from_slice(record);
    to.lock().await.write_all(&whole).await
}

async fn pass(client: TcpStream, port: u16, meddle: Arc<impl Meddle>) -> std::io::Result<()> {
    let (mut server_read, server_write) = TcpStream::connect(("127.0.0.1", port)).await?.into_split();
    let (mut client_read, client_write) = client.into_split();
    let (server_write, client_write) = (Mutex::new(server_write), Mutex::new(client_write));
    let up = async {
        loop {
            let request = record(&mut client_read).await?;
            match meddle.request(&request) {
                Some(answer) => send(&client_write, &answer).await?,
                None => send(&server_write, &request).await?,
            }
        }
    };
    let down = async {
        loop {
            let answer = record(&mut server_read).await?;
            send(&client_write, &meddle.answer(answer)).await?;
        }
    };
    tokio::select! {
        done = up => done,
        done = down => done,
    }
}

/// Stands between us and the server's NFS port; returns its own.
async fn between(server: &Server, meddle: Arc<impl Meddle>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (own, port) = (listener.local_addr().unwrap().port(), server.port());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(pass(client, port, meddle.clone()));
        }
    });
    own
}

fn through(server: &Server, version: Version, port: u16) -> Target {
    let mut target = server.target(version);
    target.options.port = Some(port);
    target
}

/// Does a little of everything, and counts what succeeded and what made no sense.
async fn exercise(share: &Share, good: &mut u32, senseless: &mut u32) {
    let mut judge = |result: Result<(), Error>| match result {
        Ok(()) => *good += 1,
        Err(error) if error.kind() == Kind::Protocol => *senseless += 1,
        Err(_) => {}
    };
    let root = share.root();
    let name = Name::new("colour").unwrap();
    let file = share.create(&root, "file", Create::Truncate, &Change::mode(0o644)).await;
    let handle = file.as_ref().map_or_else(|_| root.clone(), |file| file.handle.clone());
    judge(file.map(drop));
    judge(share.write(&handle, 0, Bytes::from(vec![7; 5000]), false).await.map(drop));
    judge(share.commit(&handle).await);
    judge(share.read(&handle, 0, 10_000).await.map(|(data, _)| assert!(data.len() <= 10_000)));
    judge(share.attributes(&handle).await.map(|is| assert!(is.mode <= 0o7777)));
    judge(share.make_dirs("a/b/c", &Change::mode(0o755)).await.map(drop));
    judge(share.symlink(&root, "link", b"target", &Change::default()).await.map(drop));
    judge(share.make_node(&root, "fifo", Node::Fifo, &Change::default()).await.map(drop));
    judge(share.link(&handle, &root, "second").await);
    judge(share.rename(&root, "second", &root, "third").await);
    judge(share.space(&root).await.map(drop));
    judge(share.set_xattr(&handle, &name, Bytes::from_static(b"red")).await.map(drop));
    judge(share.xattrs(&handle).await.map(drop));
    judge(share.next_data(&handle, 0).await.map(drop));
    judge(share.copy_range(&handle, 0, &handle, 8192, 100).await.map(drop));
    let page = share.read_dir(&root, Cookie::default()).await;
    if let Ok(page) = &page {
        assert!(page.entries.iter().all(|entry| !entry.name.as_bytes().contains(&b'/')));
    }
    judge(page.map(drop));
    let link = share.lookup(&root, "link").await;
    if let Ok(link) = &link {
        judge(share.read_link(&link.handle).await.map(drop));
    }
    judge(share.usage(&root).await.map(drop));
    for name in ["a", "link", "fifo", "third", "file"] {
        judge(share.remove_tree(&root, name).await);
    }
}

/// Damages every third answer.
struct Damage {
    state: AtomicU64,
}

impl Damage {
    /// Numbers that are the same in every run.
    fn next(&self, below: usize) -> usize {
        let mut x = self.state.load(Ordering::Relaxed);
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.state.store(x, Ordering::Relaxed);
        usize::try_from(x >> 16).unwrap() % below
    }
}

impl Meddle for Damage {
    fn answer(&self, mut record: Vec<u8>) -> Vec<u8> {
        if self.next(3) != 0 || record.len() < 28 {
            return record;
        }
        // The xid stays, else nobody would read it.
        match self.next(4) {
            0 => {
                let at = 4 + self.next(record.len() - 4);
                record.truncate(at);
            }
            1 => record.extend_from_slice(&[0xff; 64]),
            kind => {
                for _ in 0..=self.next(3) {
                    // Words, since that is what lengths and counts are.
                    let at = 4 + 4 * self.next(record.len() / 4 - 1);
                    let word = match kind {
                        2 => [0xff, 0xff, 0xff, 0xff],
                        _ => u32::try_from(self.next(1 << 20)).unwrap().to_be_bytes(),
                    };
                    record[at..at + 4].copy_from_slice(&word);
                }
            }
        }
        record
    }
}

#[tokio::test]
async fn damaged_answers_are_survived() {
    let rounds: u64 = std::env::var("BERTH_NFS_FUZZ_ROUNDS").map_or(6, |rounds| rounds.parse().unwrap());
    let server = Server::start();
    for version in Version::ALL {
        let (mut good, mut senseless) = (0, 0);
        for round in 1..=rounds {
            let damage =
                Arc::new(Damage { state: AtomicU64::new(round.wrapping_mul(0x9e37_79b9_7f4a_7c15)) });
            let mut target = through(&server, version, between(&server, damage).await);
            // What is damaged is often no answer at all.
            target.options.timeout = Duration::from_millis(200);
            let nfs = Nfs::new();
            let all = async {
                for _ in 0..20 {
                    if let Ok(share) = nfs.share(&target).await {
                        return exercise(&share, &mut good, &mut senseless).await;
                    }
                }
            };
            timeout(Duration::from_secs(60), all).await.unwrap_or_else(|_| panic!("{version} {round} hangs"));
        }
        assert!(good > 0 && senseless > 0, "{version}: {good} good, {senseless} senseless");
    }
}

/// Answers as a server without READDIRPLUS.
struct NoPlus;

impl Meddle for NoPlus {
    fn request(&self, record: &[u8]) -> Option<Vec<u8>> {
        let word = |at: usize| u32::from_be_bytes(record[at..at + 4].try_into().unwrap());
        if (word(12), word(16), word(20)) != (100_003, 3, 17) {
            return None;
        }
        let mut answer = record[..4].to_vec();
        // Accepted, no verifier, success, NFS3ERR_NOTSUPP, no attributes.
        for value in [1_u32, 0, 0, 0, 0, 10004, 0] {
            answer.extend_from_slice(&value.to_be_bytes());
        }
        Some(answer)
    }
}

#[tokio::test]
async fn a_server_without_readdirplus_is_asked_entry_by_entry() {
    let server = Server::start();
    let port = between(&server, Arc::new(NoPlus)).await;
    let share = Nfs::new().share(&through(&server, Version::V3, port)).await.unwrap();
    for n in 0..50_usize {
        std::fs::write(server.export().join(format!("{n}")), vec![0; n]).unwrap();
    }
    let page =
        share.read_dir(&share.root(), Cookie::default()).await.unwrap_or_else(|e| panic!("{}", chain(&e)));
    assert_eq!(page.entries.len(), 50);
    for entry in page.entries {
        assert_eq!(entry.name.to_str().unwrap().parse(), Ok(entry.attributes.size));
    }
}

/// Names of a directory that lead out of it.
struct Escape;

impl Meddle for Escape {
    fn answer(&self, record: Vec<u8>) -> Vec<u8> {
        let at = record.windows(4).position(|window| window == b"evil");
        let mut record = record;
        if let Some(at) = at {
            record[at..at + 4].copy_from_slice(b"../x");
        }
        record
    }
}

#[tokio::test]
async fn a_listed_name_that_leads_elsewhere_is_never_used() {
    let server = Server::start();
    std::fs::create_dir(server.export().join("dir")).unwrap();
    std::fs::write(server.export().join("dir/evil"), "").unwrap();
    std::fs::write(server.export().join("x"), "").unwrap();
    for version in Version::ALL {
        let port = between(&server, Arc::new(Escape)).await;
        let share = Nfs::new().share(&through(&server, version, port)).await.unwrap();
        let error = share.remove_tree(&share.root(), "dir").await.unwrap_err();
        assert_eq!(error.kind(), Kind::Protocol, "{version}: {}", chain(&error));
        assert!(server.export().join("x").exists());
    }
}

/// The first operation of a compound of version 4; the procedure of version 3.
fn asked(record: &[u8]) -> Option<(u32, u32)> {
    let word = |at: usize| record.get(at..at + 4).map(|word| u32::from_be_bytes(word.try_into().unwrap()));
    let credential = word(28)? as usize;
    match word(16)? {
        4 => Some((4, word(32 + credential + 8 + 12)?)),
        version => Some((version, word(20)?)),
    }
}

fn accepted(request: &[u8], words: &[u32]) -> Vec<u8> {
    let mut answer = request[..4].to_vec();
    for word in [1, 0, 0, 0, 0].iter().chain(words) {
        answer.extend_from_slice(&word.to_be_bytes());
    }
    answer
}

/// Answers with a status of its own, the next few times.
struct Moody {
    status: AtomicU32,
    times: AtomicU32,
}

impl Meddle for Moody {
    fn request(&self, record: &[u8]) -> Option<Vec<u8>> {
        const SEQUENCE: u32 = 53;
        const MKDIR: u32 = 9;
        const PUTFH: u32 = 22;
        let asked = asked(record)?;
        if !matches!(asked, (4, SEQUENCE | PUTFH) | (3, MKDIR)) {
            return None;
        }
        self.times.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |times| times.checked_sub(1)).ok()?;
        let status = self.status.load(Ordering::Relaxed);
        Some(match asked {
            (4, operation) => accepted(record, &[status, 0, 1, operation, status]),
            // And no attributes, before or after.
            _ => accepted(record, &[status, 0, 0]),
        })
    }
}

#[tokio::test]
async fn a_server_that_forgot_us_or_is_busy_is_asked_again() {
    const DELAY: u32 = 10008;
    const GRACE: u32 = 10013;
    const STALE_CLIENT: u32 = 10022;
    const BAD_SESSION: u32 = 10052;
    const DEAD_SESSION: u32 = 10078;
    let server = Server::start();
    for version in Version::ALL {
        let moody = Arc::new(Moody { status: AtomicU32::new(0), times: AtomicU32::new(0) });
        let target = through(&server, version, between(&server, moody.clone()).await);
        let share = Nfs::new().share(&target).await.unwrap();
        let statuses = match version {
            Version::V3 => &[DELAY][..],
            Version::V4_0 => &[DELAY, GRACE, STALE_CLIENT],
            _ => &[DELAY, GRACE, STALE_CLIENT, BAD_SESSION, DEAD_SESSION],
        };
        for status in statuses {
            moody.status.store(*status, Ordering::Relaxed);
            moody.times.store(2, Ordering::Relaxed);
            let made = share.make_dir(&share.root(), format!("{version} {status}"), &Change::default()).await;
            made.unwrap_or_else(|error| panic!("{version} {status}: {}", chain(&error)));
            assert_eq!(moody.times.load(Ordering::Relaxed), 0);
        }
        // But not for ever.
        moody.status.store(BAD_SESSION, Ordering::Relaxed);
        moody.times.store(1000, Ordering::Relaxed);
        share.make_dir(&share.root(), format!("{version} never"), &Change::default()).await.unwrap_err();
    }
}

/// Notices an operation that is asked for.
struct Listen {
    operation: u32,
    heard: Notify,
}

const DESTROY_SESSION: u32 = 44;
const DESTROY_CLIENTID: u32 = 57;

impl Meddle for Listen {
    fn request(&self, record: &[u8]) -> Option<Vec<u8>> {
        if asked(record) == Some((4, self.operation)) {
            self.heard.notify_one();
        }
        None
    }
}

#[tokio::test]
async fn a_session_that_nobody_needs_says_good_bye() {
    let server = Server::start();
    for version in [Version::V4_1, Version::V4_2] {
        let listen = Arc::new(Listen { operation: DESTROY_CLIENTID, heard: Notify::new() });
        let target = through(&server, version, between(&server, listen.clone()).await);
        let nfs = Nfs::new();
        let share = nfs.share(&target).await.unwrap();
        drop(nfs);
        share.attributes(&share.root()).await.unwrap();
        drop(share);
        timeout(Duration::from_secs(20), listen.heard.notified()).await.expect("it is heard");
    }
}

#[tokio::test]
async fn a_connection_that_nobody_uses_is_closed_and_made_again() {
    let server = Server::start();
    let listen = Arc::new(Listen { operation: DESTROY_SESSION, heard: Notify::new() });
    let target = through(&server, Version::V4_1, between(&server, listen.clone()).await);
    let nfs = Nfs::new();
    let share = nfs.share(&target).await.unwrap();
    // The clock jumps to whatever is waited for next.
    tokio::time::pause();
    timeout(Duration::from_secs(3600), listen.heard.notified()).await.expect("it is closed");
    tokio::time::resume();
    share.attributes(&share.root()).await.unwrap();
}

/// A line of a kilobyte per second, in our direction.
async fn slow_line(server: &Server) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (own, port) = (listener.local_addr().unwrap().port(), server.port());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from_server, mut to_server) =
                    TcpStream::connect(("127.0.0.1", port)).await.unwrap().into_split();
                let (mut from_client, mut to_client) = client.into_split();
                let up = tokio::io::copy(&mut from_client, &mut to_server);
                let down = async {
                    let mut piece = [0; 50];
                    loop {
                        let length = from_server.read(&mut piece).await?;
                        to_client.write_all(&piece[..length]).await?;
                        if length == 0 {
                            return Ok(0);
                        }
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                };
                tokio::select! {
                    done = up => done,
                    done = down => done,
                }
            });
        }
    });
    own
}

#[tokio::test]
async fn a_slow_line_carries_what_is_small_and_is_not_clogged_by_what_is_large() {
    let server = Server::start();
    std::fs::write(server.export().join("large"), vec![1; 1 << 20]).unwrap();
    let port = slow_line(&server).await;
    // Each has a line of its own, so they need not wait for each other.
    join_all([Version::V3, Version::V4_1].map(async |version| {
        let mut target = through(&server, version, port);
        target.options.timeout = Duration::from_secs(2);
        let share =
            Nfs::new().share(&target).await.unwrap_or_else(|error| panic!("{version} {}", chain(&error)));
        let large = share.lookup(&share.root(), "large").await.unwrap().handle;
        let begun = Instant::now();
        let error = share.read(&large, 0, 1 << 20).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unreachable, "{}", chain(&error));
        // Six timeouts; the line would need a quarter of an hour.
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        let made = share.make_dirs(&format!("{version}"), &Change::default()).await;
        made.unwrap_or_else(|error| panic!("{version} {}", chain(&error)));
    }))
    .await;
}

#[test]
fn everything_can_be_awaited_on_any_thread() {
    fn sendable<T: Send>(_: T) {}
    let _ = |nfs: &Nfs, share: &Share, target: &Target| {
        let (handle, name, change) = (share.root(), Name::new("x").unwrap(), Change::default());
        sendable(nfs.share(target));
        sendable(share.lookup(&handle, &name));
        sendable(share.create(&handle, "x", Create::New, &change));
        sendable(share.rename(&handle, "x", &handle, "y"));
        sendable(share.read_dir(&handle, Cookie::default()));
        sendable(share.write(&handle, 0, Bytes::new(), true));
        sendable(share.copy_range(&handle, 0, &handle, 0, 1));
        sendable(share.make_dirs("a", &change));
        sendable(share.remove_tree(&handle, &name));
        sendable(share.copy_tree(&handle, share, &handle));
        sendable(share.usage(&handle));
    };
}

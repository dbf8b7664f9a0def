//! A server whose answers are not to be trusted: Ganesha's, damaged or forged on their way to us.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use berth_nfs::{Change, Cookie, Create, Error, Kind, Name, Nfs, Node, Share, Target, Version};
use bytes::Bytes;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::Mutex,
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
    let (own, port) = (listener.local_addr().unwrap().port(), server.port);
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
    target.options.timeout = Duration::from_millis(200);
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
            let target = through(&server, version, between(&server, damage).await);
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
    let mut target = through(&server, Version::V3, port);
    target.options.timeout = Duration::from_secs(20);
    let share = Nfs::new().share(&target).await.unwrap();
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

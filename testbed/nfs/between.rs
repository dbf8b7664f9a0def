//! Stands between a client and the NFS port of a server, for tests of what goes wrong on the way.
//!
//! Every suite that needs it takes this file in as a module of its own.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

const LAST_FRAGMENT: u32 = 1 << 31;
const NO_XID: u32 = 0;

/// A request of a client.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    record: &'a [u8],
}

/// What becomes of a request.
#[derive(Debug)]
pub(crate) enum Fate {
    /// The server gets it.
    Passed,
    /// The server never hears of it, and this is its answer.
    Answered(Vec<u8>),
    /// The server does it, and then the connection breaks without an answer.
    Cut,
}

/// What is asked for, in both versions alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Making a file: `CREATE` of version 3, `OPEN` of version 4.
    Create,
    /// Making anything else.
    Make,
    Link,
    Lookup,
    Read,
    ReadLink,
    Rename,
    SetAttributes,
    Other,
}

impl Request<'_> {
    fn word(&self, at: usize) -> Option<u32> {
        Some(u32::from_be_bytes(self.record.get(at..at + 4)?.try_into().ok()?))
    }

    /// Where the arguments begin.
    fn arguments(&self) -> Option<usize> {
        let credential = self.word(28)? as usize;
        let verifier = self.word(32 + credential + 4)? as usize;
        Some(32 + credential + 8 + verifier)
    }

    /// The number of an opaque's bytes with its length and padding.
    fn opaque(&self, at: usize) -> Option<usize> {
        Some(4 + (self.word(at)? as usize).next_multiple_of(4))
    }

    /// What is asked for, and where its own arguments begin, behind the handle.
    fn call(&self) -> Option<(Asked, usize)> {
        const NFS: u32 = 100_003;
        if self.word(12)? != NFS {
            return None;
        }
        let mut at = self.arguments()?;
        if self.word(16)? == 3 {
            let asked = match self.word(20)? {
                2 => Asked::SetAttributes,
                3 => Asked::Lookup,
                5 => Asked::ReadLink,
                6 => Asked::Read,
                8 => Asked::Create,
                9..=11 => Asked::Make,
                14 => Asked::Rename,
                15 => Asked::Link,
                _ => Asked::Other,
            };
            return Some((asked, at + self.opaque(at)?));
        }
        // The tag, the minor version, and how many operations there are.
        at += self.opaque(at)? + 8;
        loop {
            const PUTFH: u32 = 22;
            const SAVEFH: u32 = 32;
            const SEQUENCE: u32 = 53;
            let operation = self.word(at)?;
            at += 4;
            let asked = match operation {
                PUTFH => {
                    at += self.opaque(at)?;
                    continue;
                }
                SEQUENCE => {
                    at += 32;
                    continue;
                }
                SAVEFH => continue,
                6 => Asked::Make,
                11 => Asked::Link,
                15 => Asked::Lookup,
                18 => Asked::Create,
                // A state comes before the offset.
                25 => return Some((Asked::Read, at + 16)),
                27 => Asked::ReadLink,
                29 => Asked::Rename,
                34 => Asked::SetAttributes,
                _ => Asked::Other,
            };
            return Some((asked, at));
        }
    }

    /// What is asked for.
    pub(crate) fn asked(&self) -> Asked {
        self.call().map_or(Asked::Other, |(asked, _)| asked)
    }

    /// Where a file is to be read, and how much of it.
    pub(crate) fn range(&self) -> Option<(u64, u32)> {
        let (asked, at) = self.call()?;
        let (high, low, length) = (self.word(at)?, self.word(at + 4)?, self.word(at + 8)?);
        (asked == Asked::Read).then_some((u64::from(high) << 32 | u64::from(low), length))
    }

    /// The handle in a request of version 3.
    pub(crate) fn handle(&self) -> Option<Vec<u8>> {
        let at = self.arguments()?;
        Some(self.record.get(at + 4..at + self.opaque(at)?)?.to_vec())
    }

    /// The answer that it failed with this status, without any attributes; versions 3 and 4.0.
    pub(crate) fn failed(&self, status: u32) -> Fate {
        const PUTFH: u32 = 22;
        let mut answer = self.record[..4].to_vec();
        let version = self.word(16);
        let words = if version == Some(3) { vec![status, 0, 0] } else { vec![status, 0, 1, PUTFH, status] };
        for word in [1, 0, 0, 0, 0].into_iter().chain(words) {
            answer.extend_from_slice(&u32::to_be_bytes(word));
        }
        Fate::Answered(answer)
    }
}

fn record(from: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut record = Vec::new();
    loop {
        let mut header = [0; 4];
        from.read_exact(&mut header)?;
        let header = u32::from_be_bytes(header);
        let start = record.len();
        record.resize(start + (header & !LAST_FRAGMENT) as usize, 0);
        from.read_exact(&mut record[start..])?;
        if header & LAST_FRAGMENT != 0 {
            return Ok(record);
        }
    }
}

fn send(to: &Mutex<TcpStream>, record: &[u8]) -> io::Result<()> {
    let length = u32::try_from(record.len()).map_err(io::Error::other)?;
    let whole = [&(length | LAST_FRAGMENT).to_be_bytes(), record].concat();
    to.lock().map_err(|_| io::ErrorKind::Other)?.write_all(&whole)
}

fn xid(record: &[u8]) -> u32 {
    record.first_chunk().map_or(NO_XID, |xid| u32::from_be_bytes(*xid))
}

/// Passes records on in both directions until either side ends.
fn pass(client: TcpStream, port: u16, fate: &(impl Fn(&Request<'_>) -> Fate + Sync)) -> io::Result<()> {
    let server = TcpStream::connect(("127.0.0.1", port))?;
    let (mut from_client, mut from_server) = (client.try_clone()?, server.try_clone()?);
    let (to_client, to_server) = (Mutex::new(client), Mutex::new(server));
    let cut = AtomicU32::new(NO_XID);
    let end = || {
        for socket in [&to_client, &to_server] {
            let _ = socket.lock().map(|socket| socket.shutdown(Shutdown::Both));
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let _: io::Result<()> = (|| {
                loop {
                    let answer = record(&mut from_server)?;
                    if xid(&answer) == cut.load(Ordering::SeqCst) {
                        return Ok(());
                    }
                    send(&to_client, &answer)?;
                }
            })();
            end();
        });
        let passed = (|| {
            loop {
                let request = record(&mut from_client)?;
                match fate(&Request { record: &request }) {
                    Fate::Passed => send(&to_server, &request)?,
                    Fate::Answered(answer) => send(&to_client, &answer)?,
                    Fate::Cut => {
                        cut.store(xid(&request), Ordering::SeqCst);
                        send(&to_server, &request)?;
                    }
                }
            }
        })();
        end();
        passed
    })
}

/// Listens in front of a server's port, and gives its own. Of every connection, one request at a time is judged.
pub(crate) fn between(
    port: u16,
    fate: impl Fn(&Request<'_>) -> Fate + Send + Sync + 'static,
) -> io::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let own = listener.local_addr()?.port();
    let fate = Arc::new(fate);
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let fate = fate.clone();
            thread::spawn(move || pass(client, port, &*fate));
        }
    });
    Ok(own)
}

//! One connection against servers that behave in every way but the expected.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt as _, future::join_all};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::Instant,
};

use super::{message::REPLY, *};
use crate::{metrics::Meter, status::Fault, xdr::Encoder};

const NULL: Procedure = Procedure { program: 1, version: 1, number: 0 };
const LAST: u32 = 1 << 31;

fn nobody() -> Credential {
    Credential { uid: 65534, gid: 65534, groups: Groups::new(&[]) }
}

/// Serves one connection in some way.
async fn served<F: Future<Output = ()> + Send + 'static>(serve: impl FnOnce(TcpStream) -> F) -> Connection {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = Endpoint {
        host: "127.0.0.1".to_owned(),
        port: listener.local_addr().unwrap().port(),
        reserved: Some(false),
        timeout: Duration::from_secs(10),
    };
    let connection = Connection::open(&endpoint, &Meter::default()).await.unwrap();
    tokio::spawn(serve(listener.accept().await.unwrap().0));
    connection
}

/// Reads a request; its xid and its arguments, which are one number.
async fn request_of(socket: &mut TcpStream) -> (u32, u32) {
    let length = socket.read_u32().await.unwrap() & !LAST;
    let mut record = vec![0; length as usize];
    socket.read_exact(&mut record).await.unwrap();
    let word = |at: usize| u32::from_be_bytes(record[at..at + 4].try_into().unwrap());
    (word(0), word(record.len() - 4))
}

/// A successful answer whose results are one number.
fn answer(xid: u32, result: u32) -> Vec<u8> {
    [xid, REPLY, 0, 0, 0, 0, result].iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn framed(record: &[u8]) -> Vec<u8> {
    [&(u32::try_from(record.len()).unwrap() | LAST).to_be_bytes(), record].concat()
}

async fn ask(connection: &Connection, number: u32) -> Result<u32, Fault> {
    let mut arguments = Encoder::default();
    arguments.u32(number);
    Ok(connection.call(NULL, nobody(), arguments).await?.u32()?)
}

#[tokio::test]
async fn answers_in_any_order_find_their_callers() {
    let connection = served(async |mut socket| {
        let mut requests = Vec::new();
        for _ in 0..50 {
            requests.push(request_of(&mut socket).await);
        }
        for (xid, number) in requests.into_iter().rev() {
            // What nobody asked for is nobody's business.
            socket.write_all(&framed(&answer(xid.wrapping_add(1000), 7))).await.unwrap();
            socket.write_all(&framed(&answer(xid, number * 2))).await.unwrap();
        }
        socket.read_u8().await.unwrap_err();
    })
    .await;
    let results = join_all((0..50).map(|number| ask(&connection, number))).await;
    for (number, result) in (0..).zip(results) {
        assert_eq!(result.unwrap(), number * 2);
    }
}

#[tokio::test]
async fn records_may_come_in_any_pieces() {
    let connection = served(async |mut socket| {
        let (xid, number) = request_of(&mut socket).await;
        let record = answer(xid, number);
        let mut fragments = vec![0, 0, 0, 0];
        for (index, byte) in record.iter().enumerate() {
            let last = if index + 1 == record.len() { LAST } else { 0 };
            fragments.extend_from_slice(&(1 | last).to_be_bytes());
            fragments.push(*byte);
        }
        for byte in fragments {
            socket.write_all(&[byte]).await.unwrap();
            socket.flush().await.unwrap();
        }
        socket.read_u8().await.unwrap_err();
    })
    .await;
    assert_eq!(ask(&connection, 42).await.unwrap(), 42);
}

#[tokio::test]
async fn a_record_of_impossible_length_ends_the_connection() {
    for header in [LAST - 1, u32::MAX, 100 << 20] {
        let connection = served(async move |mut socket| {
            request_of(&mut socket).await;
            socket.write_u32(header).await.unwrap();
            let _ = socket.read_u8().await;
        })
        .await;
        assert!(matches!(ask(&connection, 1).await, Err(Fault::Malformed(_))));
        assert!(!connection.is_alive());
        assert!(matches!(ask(&connection, 1).await, Err(Fault::Closed)));
    }
}

#[tokio::test]
async fn refusals_are_distinguished() {
    let denied = |words: &'static [u32]| {
        served(async move |mut socket| {
            let (xid, _) = request_of(&mut socket).await;
            let record: Vec<u8> =
                [xid, REPLY].iter().chain(words).flat_map(|word| word.to_be_bytes()).collect();
            socket.write_all(&framed(&record)).await.unwrap();
            socket.read_u8().await.unwrap_err();
        })
    };
    for (words, refusal) in [
        (&[0, 0, 0, 1][..], Refusal::Program),
        (&[0, 0, 0, 2, 3, 4], Refusal::Version),
        (&[0, 0, 0, 3], Refusal::Procedure),
        (&[0, 0, 0, 4], Refusal::Arguments),
        (&[0, 0, 0, 5], Refusal::System),
        (&[1, 0, 2, 2], Refusal::Version),
        (&[1, 1, 5], Refusal::Authentication(5)),
    ] {
        match ask(&denied(words).await, 1).await {
            Err(Fault::Refused(refused)) => assert_eq!(refused, refusal),
            other => panic!("{words:?}: {other:?}"),
        }
    }
    for words in [&[2][..], &[0], &[0, 0, 401, 0], &[0, 0, 0, 6], &[1, 2], &[]] {
        assert!(matches!(ask(&denied(words).await, 1).await, Err(Fault::Malformed(_))), "{words:?}");
    }
}

#[tokio::test]
async fn a_connection_that_breaks_fails_what_is_in_flight() {
    let connection = served(async |mut socket| {
        for _ in 0..3 {
            request_of(&mut socket).await;
        }
    })
    .await;
    for result in join_all((0..3).map(|number| ask(&connection, number))).await {
        assert!(matches!(result, Err(Fault::Broken(_))), "{result:?}");
    }
    assert!(matches!(ask(&connection, 1).await, Err(Fault::Closed)));
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_fails_all_calls_after_one_timeout() {
    let connection = served(async |mut socket| {
        let _ = socket.read_to_end(&mut Vec::new()).await;
    })
    .await;
    let begun = Instant::now();
    for result in join_all((0..200).map(|number| ask(&connection, number))).await {
        assert!(matches!(result, Err(Fault::Silent(_) | Fault::Closed)), "{result:?}");
    }
    assert!(begun.elapsed() < Duration::from_secs(21), "{:?}", begun.elapsed());
    assert!(!connection.is_alive());
}

#[tokio::test]
async fn a_dropped_call_is_forgotten_and_its_late_answer_ignored() {
    let connection = served(async |mut socket| {
        let (first, _) = request_of(&mut socket).await;
        let (second, number) = request_of(&mut socket).await;
        socket.write_all(&framed(&answer(first, 99))).await.unwrap();
        socket.write_all(&framed(&answer(second, number))).await.unwrap();
        socket.read_u8().await.unwrap_err();
    })
    .await;
    let mut arguments = Encoder::default();
    arguments.u32(1);
    drop(connection.start(NULL, nobody(), arguments).await.unwrap());
    assert_eq!(ask(&connection, 2).await.unwrap(), 2);
    assert!(connection.idle_for() > Duration::ZERO);
}

#[tokio::test]
async fn large_requests_arrive_whole_beside_small_ones() {
    let connection = served(async |mut socket| {
        for _ in 0..20 {
            let (xid, number) = request_of(&mut socket).await;
            socket.write_all(&framed(&answer(xid, number))).await.unwrap();
        }
        socket.read_u8().await.unwrap_err();
    })
    .await;
    let calls = (0..20_u32).map(|number| {
        let connection = &connection;
        async move {
            let mut arguments = Encoder::default();
            if number % 2 == 0 {
                arguments.data(Bytes::from(vec![1; 1 << 20]));
            }
            arguments.u32(number);
            connection.call(NULL, nobody(), arguments).await?.u32().map_err(Fault::from)
        }
    });
    for (number, result) in (0..).zip(join_all(calls).await) {
        assert_eq!(result.unwrap(), number);
    }
}

struct FakeConnection {
    alive: bool,
}

impl Idle for FakeConnection {
    fn is_alive(&self) -> bool {
        self.alive
    }

    fn idle_for(&self) -> Duration {
        Duration::from_secs(30)
    }
}

#[tokio::test(start_paused = true)]
async fn those_who_wait_for_a_connection_share_its_failure_and_its_success() {
    let connection = SharedConnection::<FakeConnection>::default();
    let attempts = AtomicU32::new(0);
    let failing = || {
        attempts.fetch_add(1, Ordering::Relaxed);
        async {
            tokio::time::sleep(Duration::from_secs(10)).await;
            Err(Fault::Silent(Duration::from_secs(10)))
        }
    };
    let begun = Instant::now();
    for result in join_all((0..100).map(|_| connection.get(failing))).await {
        assert!(result.is_err());
    }
    assert_eq!(begun.elapsed(), Duration::from_secs(10));
    assert_eq!(attempts.load(Ordering::Relaxed), 1);

    let working = || {
        attempts.fetch_add(1, Ordering::Relaxed);
        async { Ok(FakeConnection { alive: true }) }
    };
    let things: Vec<Arc<FakeConnection>> =
        join_all((0..100).map(|_| connection.get(working))).await.into_iter().map(Result::unwrap).collect();
    assert!(things.iter().all(|thing| Arc::ptr_eq(thing, &things[0])));
    assert_eq!(attempts.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_is_left_half_done_holds_up_no_other() {
    let connection = SharedConnection::<FakeConnection>::default();
    let failing = || async {
        tokio::time::sleep(Duration::from_secs(10)).await;
        Err(Fault::Silent(Duration::from_secs(10)))
    };
    // Both have begun to wait, and are never gone on with.
    let mut left = [Box::pin(connection.get(failing)), Box::pin(connection.get(failing))];
    for half_done in &mut left {
        assert!(half_done.now_or_never().is_none());
    }
    let soon = Duration::from_secs(11);
    assert!(tokio::time::timeout(soon, connection.get(failing)).await.unwrap().is_err());
    let working = || async { Ok(FakeConnection { alive: true }) };
    let mut left = Box::pin(connection.get(working));
    assert!((&mut left).now_or_never().is_none());
    for _ in 0..2 {
        assert!(tokio::time::timeout(soon, connection.get(working)).await.unwrap().is_ok());
    }
}

#[tokio::test]
async fn what_is_idle_or_dead_is_dropped() {
    let connection = SharedConnection::<FakeConnection>::default();
    assert!(!connection.drop_idle(Duration::ZERO));
    connection.get(|| async { Ok(FakeConnection { alive: true }) }).await.unwrap();
    assert!(connection.drop_idle(Duration::from_secs(60)));
    assert!(!connection.drop_idle(Duration::from_secs(30)));
    let dead = connection.get(|| async { Ok(FakeConnection { alive: false }) }).await.unwrap();
    let alive = connection.get(|| async { Ok(FakeConnection { alive: true }) }).await.unwrap();
    assert!(!Arc::ptr_eq(&dead, &alive));
}

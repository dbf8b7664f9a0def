//! Connections that are opened and left, and such that carry no HTTP.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{MB, Victim};

/// The server's patience with a client that does not begin to speak TLS, and some.
const LET_GO: Duration = Duration::from_secs(25);

/// Sends bytes and reads until the server closes the connection, or for a while.
async fn throw(victim: &Victim, bytes: &[u8]) -> Vec<u8> {
    let mut stream = victim.served.endpoint.raw().await.unwrap();
    let mut answer = Vec::new();
    let talk = async {
        // To be cut off is an answer, too; and what came before it can still be read.
        let _ = stream.write_all(bytes).await;
        let _ = stream.flush().await;
        let _ = stream.shutdown().await;
        let _ = stream.read_to_end(&mut answer).await;
    };
    tokio::time::timeout(LET_GO, talk).await.expect("the server ends it");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_say_nothing_are_let_go() {
    let mut victim = Victim::start(1000);
    let before = victim.served.resident();
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(TcpStream::connect(victim.served.endpoint.address).await.unwrap());
    }
    let mut half_said = Vec::new();
    for _ in 0..100 {
        let mut stream = victim.served.endpoint.raw().await.unwrap();
        stream.write_all(b"POST /api/v1/namespaces HTTP/1.1\r\nHost: loc").await.unwrap();
        stream.flush().await.unwrap();
        half_said.push(stream);
    }
    victim.is_well().await;
    for mut stream in silent {
        let mut nothing = [0; 1];
        let end = tokio::time::timeout(LET_GO, stream.read(&mut nothing)).await;
        assert!(!matches!(end.expect("the server lets go"), Ok(1)));
    }
    let grown = victim.served.resident().saturating_sub(before);
    assert!(grown < 100 * MB, "{} MB", grown / MB);
    victim.is_well().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_is_refused_wherever_it_comes() {
    let mut victim = Victim::start(1000);
    let request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let garbage: Vec<u8> = (0..20_000u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect();
    let mut pipelined = request.repeat(50);
    pipelined.extend_from_slice(&garbage);
    let answer = String::from_utf8_lossy(&throw(&victim, &pipelined).await).into_owned();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let many_headers =
        format!("GET /version HTTP/1.1\r\n{}\r\n", "X-Header: text\r\n".repeat(5000)).into_bytes();
    let long_line =
        format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "a".repeat(2_000_000)).into_bytes();
    let mut preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    preface.extend_from_slice(&garbage);
    let smuggled = b"POST /api/v1/namespaces HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET"
        .to_vec();
    for bytes in [garbage.clone(), many_headers, long_line, preface, smuggled] {
        let answer = throw(&victim, &bytes).await;
        assert!(!answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    }
    // And where TLS should be.
    let mut stream = TcpStream::connect(victim.served.endpoint.address).await.unwrap();
    let _ = stream.write_all(&garbage).await;
    let _ =
        tokio::time::timeout(LET_GO, stream.read_to_end(&mut Vec::new())).await.expect("the server ends it");
    victim.is_well().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_break_off_change_nothing() {
    let mut victim = Victim::start(1000);
    let head = "POST /api/v1/namespaces/default/configmaps HTTP/1.1\r\nHost: localhost\r\n\
                Content-Type: application/json\r\n";
    let object = r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"broken-off"}}"#;
    let length = object.len();
    for broken in [
        format!("{head}Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n{object}\r\n"),
        format!("{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{object}", length + 10),
        format!("{head}Transfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n{object}"),
        format!("{head}Transfer-Encoding: chunked\r\n\r\nno number\r\n{object}"),
        format!("{head}Content-Length: {}\r\n\r\n{object}", length + 1),
        format!("{head}Content-Length: 18446744073709551617\r\n\r\n{object}"),
        format!("{head}Content-Length: -1\r\n\r\n{object}"),
    ] {
        let answer = throw(&victim, broken.as_bytes()).await;
        assert!(!answer.starts_with(b"HTTP/1.1 2"), "{broken}\n{}", String::from_utf8_lossy(&answer));
    }
    let reply = victim.connect().await.get(&format!("{}/broken-off", super::MAPS)).await.unwrap();
    assert_eq!(reply.status, 404);
    victim.is_well().await;
}

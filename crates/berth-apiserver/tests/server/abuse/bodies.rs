//! Bodies that are too large, too deep or made to explode.

use std::fmt::Write;

use berth_apiserver::rest::{ApiServer, Options};
use berth_apiserver::store::{self, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::ServiceExt;

use super::{MAPS, MB, PATIENCE, Victim, map, put_map};

const PATCHES: [&str; 4] = [
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
];

/// Texts that nest deeper than anything should.
fn deep() -> Vec<String> {
    let lists = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let objects = format!("{}1{}", r#"{"a":"#.repeat(100_000), "}".repeat(100_000));
    let mut indented = String::new();
    for depth in 0..2000 {
        writeln!(indented, "{}a:", " ".repeat(depth)).unwrap();
    }
    vec![
        lists.clone(),
        "[".repeat(1_000_000),
        objects.clone(),
        format!(
            r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"deep","annotations":{objects}}}}}"#
        ),
        format!(r#"[{{"op":"add","path":"/data","value":{lists}}}]"#),
        format!(r#"[{{"op":"add","path":"{}","value":1}}]"#, "/a".repeat(100_000)),
        format!("a: {lists}"),
        indented,
    ]
}

/// A text of a few hundred bytes that means billions.
fn bomb() -> String {
    let mut text = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for level in 1..12 {
        let before = format!("*a{}", level - 1);
        writeln!(text, "a{level}: &a{level} [{}]", [before.as_str(); 9].join(",")).unwrap();
    }
    text
}

/// A text of 100 KB that means hundreds of megabytes: what is long is repeated, not what is nested.
fn wide_bomb() -> String {
    format!("a: &a {}\nb: [{}]\n", "x".repeat(50_000), "*a,".repeat(16_000))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deep_and_explosive_bodies_are_refused() {
    let mut victim = Victim::start(1000);
    let mut connection = victim.connect().await;
    put_map(&mut connection, "target", "x").await;
    let before = victim.served.resident();
    for body in deep().into_iter().chain([bomb(), wide_bomb()]) {
        let bytes = body.as_bytes();
        let shown = &body[..body.len().min(60)];
        for media in ["application/json", "application/yaml", "application/vnd.kubernetes.protobuf"] {
            let sent = connection.send("POST", MAPS, media, bytes);
            let reply = tokio::time::timeout(PATIENCE, sent).await.expect(shown).unwrap();
            assert!((400..500).contains(&reply.status), "{media} {shown}: {}", reply.json());
        }
        for media in PATCHES {
            let path = format!("{MAPS}/target?fieldManager=test");
            let sent = connection.send("PATCH", &path, media, bytes);
            let reply = tokio::time::timeout(PATIENCE, sent).await.expect(shown).unwrap();
            assert!((400..500).contains(&reply.status), "{media} {shown}: {} {}", reply.status, reply.json());
        }
    }
    let grown = victim.served.resident().saturating_sub(before);
    assert!(grown < 200 * MB, "{} MB", grown / MB);
    victim.is_well().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_over_the_limit_are_refused_whole() {
    let mut victim = Victim::start(1000);
    let large = map("large", &"x".repeat(4 << 20)).to_string();
    let before = victim.served.resident();
    for _ in 0..20 {
        // The refusal may come before all of the body was sent.
        let mut connection = victim.connect().await;
        if let Ok(reply) = connection.send("POST", MAPS, "application/json", large.as_bytes()).await {
            assert_eq!(reply.status, 413, "{}", reply.json());
        }
    }
    // A body that has no end.
    let mut stream = victim.served.endpoint.raw().await.unwrap();
    let head = format!("POST {MAPS} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let mut sent = 0;
    while sent < 200 << 20 && stream.write_all(chunk.as_bytes()).await.is_ok() {
        sent += chunk.len();
    }
    assert!(sent < 200 << 20, "all was taken");
    let _ = stream.read(&mut [0; 1]).await;
    let grown = victim.served.resident().saturating_sub(before);
    assert!(grown < 100 * MB, "{} MB", grown / MB);
    let reply = victim.connect().await.get(&format!("{MAPS}/large")).await.unwrap();
    assert_eq!(reply.status, 404);
    victim.is_well().await;
}

#[tokio::test(start_paused = true)]
async fn a_body_that_never_ends_is_not_waited_for_forever() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(directory.path(), store::Options::default()).unwrap();
    let api = ApiServer::new(store, Options::default());
    let never = http_body_util::StreamBody::new(futures_util::stream::pending::<
        Result<http_body::Frame<bytes::Bytes>, std::io::Error>,
    >());
    let request = ::http::Request::post(MAPS).header("content-type", "application/json").body(never).unwrap();
    let answer = tokio::time::timeout(std::time::Duration::from_secs(3600), api.oneshot(request)).await;
    assert_eq!(answer.expect("the request is given up").unwrap().status(), 504);
}

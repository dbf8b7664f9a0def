//! The page over HTTP: what it serves, to whom, and what it tells of a recording.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;

use super::*;
use crate::records::OBJECTS;

const FILES: [&str; 4] = [
    include_str!("assets/index.html"),
    include_str!("assets/page.js"),
    include_str!("assets/page.css"),
    include_str!("assets/token.html"),
];

/// A name that would be an element if anybody parsed it.
const MARKUP: &str = "<img src=x onerror=alert(1)>";

#[test]
fn the_bundle_is_small_and_asks_nobody_else() {
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    for text in FILES {
        packed.write_all(text.as_bytes()).unwrap();
        let foreign = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!foreign.contains("http://") && !foreign.contains("https://"), "an address of another site");
        for parses in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ] {
            assert!(!text.contains(parses), "{parses} parses text");
        }
    }
    let size = packed.finish().unwrap().len();
    assert!(size <= 60 << 10, "{size} bytes");
}

/// A recording of a claim that waits for a class, with markup wherever a person can write.
fn recording(directory: &std::path::Path) -> Recording {
    let time = "2026-01-01T00:10:00Z";
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "stuck", "namespace": "shop", "uid": "u1", "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": { "note": MARKUP } },
        "spec": { "storageClassName": "gone", "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
        "status": { "phase": "Pending" },
    });
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": { "name": "e", "namespace": "shop" },
        "involvedObject": { "kind": "PersistentVolumeClaim", "name": "stuck", "namespace": "shop", "uid": "u1" },
        "reason": "ProvisioningFailed", "type": "Warning", "message": format!("storageclass \"gone\" not found {MARKUP}"),
        "firstTimestamp": time, "lastTimestamp": time, "count": 3,
    });
    let lines: String = [("PersistentVolumeClaim", "shop/stuck", claim), ("Event", "shop/e", event)]
        .into_iter()
        .map(|(kind, key, object)| {
            json!({ "time": time, "type": "ADDED", "kind": kind, "key": key, "object": object }).to_string()
                + "\n"
        })
        .collect();
    std::fs::write(directory.join(OBJECTS), lines).unwrap();
    Recording::read(directory).unwrap()
}

/// Serves a recording; gives where, and the token.
async fn served(shutdown: &CancellationToken) -> (SocketAddr, Token) {
    let directory = tempfile::tempdir().unwrap();
    let token = Token::random();
    let options = Options {
        name: MARKUP.to_owned(),
        token: token.clone(),
        allow_actions: false,
        user: String::new(),
        records: None,
    };
    let page = Page::recorded(recording(directory.path()), options);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(page.serve(listener, shutdown.clone()));
    (address, token)
}

/// Sends a request as it stands; gives the status and all that comes until the peer closes, or until `enough` is in it.
fn send(address: SocketAddr, request: &str, enough: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let (mut text, mut part) = (String::new(), [0; 4096]);
    while enough.is_empty() || !text.contains(enough) {
        match stream.read(&mut part) {
            Ok(0) | Err(_) => break,
            Ok(count) => text.push_str(&String::from_utf8_lossy(&part[..count])),
        }
    }
    let status = text.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
    (status, text)
}

async fn get_with(address: SocketAddr, path: &str, headers: &[(&str, &str)], enough: &str) -> (u16, String) {
    let headers: Vec<String> = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let headers = headers.concat();
    let request = format!("GET {path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
    let enough = enough.to_owned();
    tokio::task::spawn_blocking(move || send(address, &request, &enough)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_who_has_the_link_gets_anything() {
    let shutdown = CancellationToken::new();
    let (address, token) = served(&shutdown).await;
    let host = address.to_string();
    let cookie = format!("berth-{}={}", address.port(), token.text());
    let paths = [
        "/",
        "/page.js",
        "/page.css",
        "/api/live",
        "/api/volume?id=shop/stuck",
        "/api/flow?id=shop/stuck",
        "/api/landing?class=a&size=1",
    ];
    for path in paths {
        let (status, text) = get_with(address, path, &[("Host", &host)], "").await;
        assert_eq!(status, 401, "{path} without a token");
        assert!(!text.contains("stuck") && !text.contains("function"), "{text}");
        let wrong = format!("berth-{}={}", address.port(), Token::random().text());
        assert_eq!(
            get_with(address, path, &[("Host", &host), ("Cookie", &wrong)], "").await.0,
            401,
            "{path}"
        );
        assert_eq!(
            get_with(address, path, &[("Host", "evil.example"), ("Cookie", &cookie)], "").await.0,
            421,
            "{path}"
        );
        let foreign = [("Host", host.as_str()), ("Cookie", &cookie), ("Origin", "http://evil.example")];
        assert_eq!(get_with(address, path, &foreign, "").await.0, 403, "{path}");
    }
    let (status, text) =
        get_with(address, &format!("/?token={}", token.text()), &[("Host", &host)], "").await;
    assert_eq!(status, 303);
    let text = text.to_lowercase();
    assert!(text.contains("httponly; samesite=strict") && text.contains("location: /\r\n"), "{text}");
    let (status, text) = get_with(address, "/", &[("Host", &host), ("Cookie", &cookie)], "").await;
    assert_eq!(status, 200);
    assert!(text.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{text}");
    assert!(!text.contains("unsafe-inline"), "{text}");
    shutdown.cancel();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recording_tells_what_is_wrong_and_changes_nothing() {
    let shutdown = CancellationToken::new();
    let (address, token) = served(&shutdown).await;
    let (host, cookie) = (address.to_string(), format!("berth-{}={}", address.port(), token.text()));
    let own = [("Host", host.as_str()), ("Cookie", cookie.as_str())];
    let (status, text) = get_with(address, "/api/live", &own, "\"sections\"").await;
    assert_eq!(status, 200);
    assert!(text.contains("\"code\":\"class-missing\"") && text.contains("shop/stuck"), "{text}");
    let (status, text) = get_with(address, "/api/volume?id=shop/stuck", &own, "").await;
    assert_eq!(status, 200);
    assert!(text.contains("No such class") && text.contains("\"fails\":\"CREATED\""), "{text}");
    assert_eq!(get_with(address, "/api/volume?id=shop/none", &own, "").await.0, 404);
    let body = r#"{"action":"delete","id":"shop/stuck","confirm":"stuck"}"#;
    let post = format!(
        "POST /api/act HTTP/1.1\r\nConnection: close\r\nHost: {host}\r\nOrigin: http://{host}\r\nCookie: {cookie}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = tokio::task::spawn_blocking(move || send(address, &post, "")).await.unwrap();
    assert_eq!(answer.0, 403, "{}", answer.1);
    shutdown.cancel();
}

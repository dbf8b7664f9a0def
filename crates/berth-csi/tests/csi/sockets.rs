//! Listening, stopping and connecting.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use berth_csi::v1::ProbeRequest;
use berth_csi::v1::controller_client::ControllerClient;
use berth_csi::v1::identity_client::IdentityClient;
use berth_csi::{BindError, Endpoint, GRACE_PERIOD, Listener, connect};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, timeout};
use tonic::Code;

use crate::plugin::{PATIENCE, Served, create, take};

async fn refusal(path: &Path) -> BindError {
    Listener::bind(&Endpoint::Unix(path.to_owned())).await.expect_err("the path is refused")
}

#[tokio::test]
async fn a_new_socket_and_its_directory_are_for_the_owner_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("plugins/berth/csi.sock");
    let listener = Listener::bind(&Endpoint::Unix(path.clone())).await.unwrap();
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().unwrap()), 0o750);
    drop(listener);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_socket_nobody_listens_on_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("csi.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(fs::symlink_metadata(&path).unwrap().file_type().is_socket());
    let served = Served::at(&Endpoint::Unix(path), directory, None).await;
    let answer = IdentityClient::new(served.channel()).probe(ProbeRequest {}).await.unwrap();
    assert_eq!(answer.into_inner().ready, Some(true));
}

#[tokio::test]
async fn a_socket_somebody_listens_on_is_refused_by_name_and_goes_on_working() {
    let served = Served::on_a_socket(None).await;
    let Endpoint::Unix(path) = &served.endpoint else { panic!("the plugin is on a Unix socket") };
    let error = refusal(path).await;
    assert_eq!(error.to_string(), format!("another process is listening on {}", path.display()));
    IdentityClient::new(served.channel()).probe(ProbeRequest {}).await.unwrap();
}

#[tokio::test]
async fn a_listener_too_busy_to_accept_still_counts_as_alive() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("csi.sock");
    let socket = tokio::net::UnixSocket::new_stream().unwrap();
    socket.bind(&path).unwrap();
    let _listener = socket.listen(0).unwrap();
    let _waiting = tokio::net::UnixStream::connect(&path).await.unwrap();
    assert!(matches!(refusal(&path).await, BindError::InUse(_)));
    assert!(path.exists());
}

#[tokio::test]
async fn what_is_not_a_socket_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "precious").unwrap();
    let link = directory.path().join("link");
    symlink(&file, &link).unwrap();
    let folder = directory.path().join("folder");
    fs::create_dir(&folder).unwrap();
    for path in [&file, &link, &folder] {
        let error = refusal(path).await;
        assert_eq!(error.to_string(), format!("{} exists and is not a socket", path.display()));
    }
    assert_eq!(fs::read_to_string(&link).unwrap(), "precious");
    assert!(folder.is_dir());
}

#[tokio::test]
async fn a_directory_that_cannot_be_made_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let error = refusal(&file.join("csi.sock")).await;
    assert_eq!(error.to_string(), format!("creating the directory {}", file.display()));
}

#[tokio::test]
async fn the_socket_of_a_successor_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("csi.sock");
    let first = Listener::bind(&Endpoint::Unix(path.clone())).await.unwrap();
    fs::remove_file(&path).unwrap();
    let second = Listener::bind(&Endpoint::Unix(path.clone())).await.unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
}

#[tokio::test]
async fn stopping_removes_the_socket_at_once_and_lets_a_slow_call_finish() {
    let served = Served::on_a_socket(None).await;
    let Endpoint::Unix(path) = served.endpoint.clone() else { panic!("the plugin is on a Unix socket") };
    let plugin = served.plugin.clone();
    let mut client = ControllerClient::new(served.channel());
    let call = tokio::spawn(async move { client.create_volume(create("slow")).await });
    take(&plugin.began, 1).await;

    let stopping = served.stop();
    let gone = async {
        while path.exists() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, gone).await.unwrap();
    assert!(!stopping.is_finished());

    plugin.gate.add_permits(1);
    let answer = timeout(PATIENCE, call).await.unwrap().unwrap().unwrap();
    assert_eq!(answer.into_inner().volume.unwrap().volume_id, "slow");
    timeout(PATIENCE, stopping).await.unwrap().unwrap();
}

#[tokio::test]
async fn stopping_waits_for_a_call_whose_client_is_gone() {
    let served = Served::on_a_socket(None).await;
    let plugin = served.plugin.clone();
    let mut client = ControllerClient::new(served.channel());
    let call = tokio::spawn(async move { client.create_volume(create("slow")).await });
    take(&plugin.began, 1).await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());

    // Paused, the clock only moves on when there is nothing left to do.
    tokio::time::pause();
    let mut stopping = served.stop();
    assert!(timeout(GRACE_PERIOD / 2, &mut stopping).await.is_err());
    plugin.gate.add_permits(1);
    let began = Instant::now();
    stopping.await.unwrap();
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert_eq!(plugin.done.available_permits(), 1);
}

#[tokio::test]
async fn stopping_gives_up_on_a_call_that_never_finishes() {
    let served = Served::on_a_socket(None).await;
    let plugin = served.plugin.clone();
    let mut client = ControllerClient::new(served.channel());
    let _call = tokio::spawn(async move { client.create_volume(create("slow")).await });
    take(&plugin.began, 1).await;

    tokio::time::pause();
    let began = Instant::now();
    served.stop().await.unwrap();
    let took = began.elapsed();
    assert!(took >= GRACE_PERIOD && took < GRACE_PERIOD * 2, "{took:?}");
}

#[tokio::test]
async fn a_channel_made_before_the_server_finds_it_and_finds_its_successor() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = Endpoint::Unix(directory.path().join("csi.sock"));
    let mut client = IdentityClient::new(connect(&endpoint));
    assert_eq!(client.probe(ProbeRequest {}).await.unwrap_err().code(), Code::Unavailable);
    for _ in 0..2 {
        let served = Served::at(&endpoint, tempfile::tempdir().unwrap(), None).await;
        client.probe(ProbeRequest {}).await.unwrap();
        timeout(PATIENCE, served.stop()).await.unwrap().unwrap();
        assert_eq!(client.probe(ProbeRequest {}).await.unwrap_err().code(), Code::Unavailable);
    }
}

#[tokio::test]
async fn a_plugin_can_be_reached_over_tcp() {
    let endpoint = "tcp://127.0.0.1:0".parse().unwrap();
    let served = Served::at(&endpoint, tempfile::tempdir().unwrap(), None).await;
    assert!(matches!(served.endpoint, Endpoint::Tcp { port, .. } if port != 0));
    IdentityClient::new(served.channel()).probe(ProbeRequest {}).await.unwrap();
    let error = Listener::bind(&served.endpoint).await.unwrap_err();
    assert_eq!(error.to_string(), format!("listening on {}", served.endpoint));
}

/// As grpc-go writes two calls of Probe to a socket that it knows only by its path: the second refers to the first.
const CALLS_FROM_GO: [&str; 2] = [
    "83864590608832fdc2be490b524c9f4c6bb0f19741a754587b8ec545868346a8b0f5b632d054aa2c35d16cc6a91158598c84d9e9\
     51611ad61665d072755f8b1d75d0620d263d4c4d65647a8b9acac8b4c7602bbafaecff40027465864d833505b11f",
    "8386c2c1c0bfbe40899acac8b24d494f6a7f867df7df6836ff",
];

#[tokio::test]
async fn clients_that_name_the_socket_by_its_path_are_answered() {
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let served = Served::on_a_socket(None).await;
    let Endpoint::Unix(path) = &served.endpoint else { panic!("the plugin is on a Unix socket") };
    let mut client = tokio::net::UnixStream::connect(path).await.unwrap();
    client
        .write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &frame(4, 0, 0, &[])[..]].concat())
        .await
        .unwrap();
    for (stream, call) in [1, 3].into_iter().zip(CALLS_FROM_GO) {
        let digits: Vec<u8> = call.bytes().collect();
        let block: Vec<u8> = digits
            .chunks(2)
            .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
            .collect();
        client.write_all(&frame(HEADERS, 4, stream, &block)).await.unwrap();
        client.write_all(&frame(DATA, 1, stream, &[0; 5])).await.unwrap();
        let answer = timeout(PATIENCE, async {
            loop {
                let mut head = [0; 9];
                client.read_exact(&mut head).await.unwrap();
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
                let mut payload = vec![0; usize::try_from(length).unwrap()];
                client.read_exact(&mut payload).await.unwrap();
                if head[8] == stream {
                    return (head[3], payload);
                }
            }
        });
        let (kind, payload) = answer.await.unwrap();
        // `:status: 200`; a refusal would be a reset.
        assert_eq!((kind, payload.first()), (HEADERS, Some(&0x88)));
    }
}

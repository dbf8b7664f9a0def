//! What goes through, and what comes out.

use bytes::Bytes;
use tokio::io::AsyncReadExt as _;
use tokio_util::io::StreamReader;

use super::{CHUNK, HEADERS, LONGEST, Lenient, PADDED, PRIORITY, symbol};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Two headers, and the authority as grpc-go writes it.
const FROM_GO: &str =
    "838641a754587b8ec545868346a8b0f5b632d054aa2c35d16cc6a91158598c84d9e951611ad61665d07275";
const SENT: &str = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fa-reg.sock";
const WANTED: &str = "-2Fvar-2Flib-2Fkubelet-2Fplugins_registry-2Fa-reg.sock";
/// Where the text of that begins.
const TEXT: usize = 4;

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |digit: u8| u8::try_from(char::from(digit).to_digit(16).unwrap()).unwrap();
    hex.as_bytes().chunks(2).map(|two| digit(two[0]) << 4 | digit(two[1])).collect()
}

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
}

fn decoded(text: &[u8]) -> String {
    let (mut at, mut found) = (0, String::new());
    while let Some((next, length)) = symbol(text, at) {
        found.push(char::from(next));
        at += length;
    }
    found
}

/// What comes out of a connection on which this comes in, so many bytes at a time.
async fn through(sent: &[u8], at_a_time: usize) -> Vec<u8> {
    let chunks: Vec<std::io::Result<Bytes>> =
        sent.chunks(at_a_time).map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect();
    let mut got = Vec::new();
    let mut connection = Lenient::new(StreamReader::new(tokio_stream::iter(chunks)));
    connection.read_to_end(&mut got).await.unwrap();
    got
}

/// The payload of the only frame after the preface.
async fn payload(flags: u8, payload: &[u8]) -> Vec<u8> {
    let got = through(&[PREFACE, &frame(HEADERS, flags, payload)].concat(), CHUNK).await;
    got[PREFACE.len() + 9..].to_vec()
}

#[tokio::test]
async fn a_path_that_go_sends_becomes_a_host_of_the_same_length() {
    let block = bytes(FROM_GO);
    assert_eq!(decoded(&block[TEXT..]), SENT);
    let got = payload(4, &block).await;
    assert_eq!(got[..TEXT], block[..TEXT]);
    assert_eq!(decoded(&got[TEXT..]), WANTED);
}

#[tokio::test]
async fn a_path_in_plain_text_becomes_a_host() {
    for (name, path, host) in [
        ([0x41, 13], "/run/csi.sock", "-run-csi.sock"),
        ([0x01, 13], "%2Fcsi.socket", "-2Fcsi.socket"),
        ([0x11, 13], "localhost:443", "localhost:443"),
    ] {
        let got = payload(4, &[&name, path.as_bytes()].concat()).await;
        assert_eq!(got[2..], *host.as_bytes());
    }
}

#[tokio::test]
async fn only_the_authority_is_touched() {
    // A name of its own, `:path` and the size of the table, all with slashes.
    let block = b"\x3f\xe1\x1f\x40\x03a/b\x02/%\x44\x05/a/%2\x41\x02/a\x04\x02/%";
    let got = payload(4, block).await;
    assert_eq!(got, b"\x3f\xe1\x1f\x40\x03a/b\x02/%\x44\x05/a/%2\x41\x02-a\x04\x02/%");
}

#[tokio::test]
async fn padding_and_priority_are_not_taken_for_headers() {
    let plain = b"\x41\x02/a";
    let padded = [&[3][..], plain, b"/%/"].concat();
    assert_eq!(payload(PADDED, &padded).await, b"\x03\x41\x02-a/%/");
    let both = [&[2, 0x41, 0x02, b'/', b'/', 7][..], plain, b"//"].concat();
    assert_eq!(payload(PADDED | PRIORITY, &both).await, b"\x02\x41\x02//\x07\x41\x02-a//");
}

#[tokio::test]
async fn a_stream_comes_through_however_it_is_cut() {
    let data = frame(0, 1, b"\x41\x02/a");
    let settings = frame(4, 0, &[]);
    let whole = |block: &[u8]| [PREFACE, &settings, &frame(HEADERS, 4, block), &data, &data].concat();
    let sent = whole(&bytes(FROM_GO));
    let mut block = bytes(FROM_GO);
    super::correct(&mut block).unwrap();
    for at_a_time in [1, 2, 7, 30, sent.len()] {
        assert_eq!(through(&sent, at_a_time).await, whole(&block), "{at_a_time} bytes at a time");
    }
    // It may end anywhere.
    for end in 0..sent.len() {
        assert_eq!(through(&sent[..end], 5).await.len(), end);
    }
}

#[tokio::test]
async fn what_is_wrong_comes_through_as_it_is() {
    let long = vec![b'/'; LONGEST + 1];
    for wrong in [
        frame(HEADERS, 4, b"\x41\x7f"),
        frame(HEADERS, 4, b"\x41\xff\xff\xff\xff\xff"),
        frame(HEADERS, 4, b"\x41\x05/a"),
        frame(HEADERS, PADDED, b"\xff/"),
        frame(HEADERS, PRIORITY, b"/"),
        frame(HEADERS, PADDED, b""),
        frame(HEADERS, 4, &long),
    ] {
        let sent = [PREFACE, &wrong].concat();
        assert_eq!(through(&sent, CHUNK).await, sent);
    }
}

//! Headers and frames; real clients are in the tests of the whole binary.

use async_trait::async_trait;
use tokio::io::duplex;

use super::*;
use crate::pods::{AttachOptions, ExecOptions, ExecSession, LogOptions, LogStream, PodsError};

#[test]
fn the_dictionary_is_that_of_the_specification() {
    let dictionary = dictionary();
    assert_eq!(dictionary.len(), 1423);
    // The checksum that clients name it by.
    let (mut a, mut b) = (1_u32, 0_u32);
    for byte in dictionary {
        a = (a + u32::from(byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    assert_eq!((b << 16) | a, 0xe3c6_a7c2);
}

fn block(headers: &[(&str, &str)]) -> Vec<u8> {
    let mut block = u32::try_from(headers.len()).unwrap().to_be_bytes().to_vec();
    for (name, value) in headers {
        for text in [name, value] {
            block.extend_from_slice(&u32::try_from(text.len()).unwrap().to_be_bytes());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

#[test]
fn headers_go_on_from_block_to_block_and_bad_ones_are_refused() {
    let mut reader = HeaderReader::new();
    let mut first = ZLIB_HEADER.to_vec();
    first.extend(stored(&block(&[("Port", "80"), ("streamtype", "data")])));
    let headers = reader.read(&first).unwrap();
    assert_eq!((headers["port"].as_str(), headers["streamtype"].as_str()), ("80", "data"));
    assert_eq!(reader.read(&stored(&block(&[("a", "b")]))).unwrap()["a"], "b");
    assert!(reader.read(&stored(&[0, 0, 0, 1, 0, 0, 0, 9])).is_err(), "a length beyond the end");
    assert!(HeaderReader::new().read(&[0x78]).is_err());
    assert!(HeaderReader::new().read(&[0x78, 0x01, 0xff, 0xff]).is_err());
    // As zlib compresses them with the dictionary.
    let compressed = "78f9e3c6a7c202253a48f95b044aab4c16064092b308125b99a054cc68004e872545a989b9d0a2863515141100000000ffff";
    let bytes: Vec<u8> = (0..compressed.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&compressed[at..at + 2], 16).unwrap())
        .collect();
    let headers = HeaderReader::new().read(&bytes).unwrap();
    let of = |name: &str| headers.get(name).map(String::as_str);
    assert_eq!((of("port"), of("requestid"), of("streamtype")), (Some("80"), Some("0"), Some("error")));
    let long = "x".repeat(40_000);
    let mut reader = HeaderReader::new();
    let mut first = ZLIB_HEADER.to_vec();
    first.extend(stored(&block(&[("a", &long)])));
    first.extend(stored(long.as_bytes()));
    assert!(reader.read(&first).is_err(), "headers of 80,000 bytes");
}

/// A pod that sends back what it gets on port 7, and listens nowhere else.
struct Echo;

#[async_trait]
impl Pods for Echo {
    async fn logs(&self, _: &Value, _: LogOptions) -> Result<LogStream, PodsError> {
        unreachable!("nobody asks for a log")
    }

    async fn exec(&self, _: &Value, _: ExecOptions) -> Result<ExecSession, PodsError> {
        unreachable!("nobody runs a command")
    }

    async fn attach(&self, _: &Value, _: AttachOptions) -> Result<ExecSession, PodsError> {
        unreachable!("nobody attaches")
    }

    async fn connect(&self, _: &Value, port: u16) -> Result<Connection, PodsError> {
        if port != 7 {
            return Err(PodsError::Internal("connection refused".to_owned()));
        }
        let (near, far) = duplex(64);
        tokio::spawn(async move {
            let (mut reader, mut writer) = tokio::io::split(far);
            let _ = tokio::io::copy(&mut reader, &mut writer).await;
            let _ = writer.shutdown().await;
        });
        Ok(Box::new(near))
    }
}

fn syn(stream: u32, begin: &[u8], headers: &[(&str, &str)]) -> Bytes {
    let mut payload = stream.to_be_bytes().to_vec();
    payload.extend_from_slice(&[0; 6]);
    payload.extend_from_slice(begin);
    payload.extend(stored(&block(headers)));
    control(SYN_STREAM, 0, &payload)
}

#[tokio::test]
async fn a_port_is_connected_by_two_streams_and_a_refusal_comes_on_the_second() {
    let (mut client, far) = duplex(1 << 20);
    let shutdown = CancellationToken::new();
    let served = tokio::spawn(async move { serve(far, Arc::new(Echo), Value::Null, &shutdown).await });
    let request = |port, id, kind| [("port", port), ("requestid", id), ("streamtype", kind)];
    client.write_all(&syn(1, &ZLIB_HEADER, &request("7", "0", "error"))).await.unwrap();
    client.write_all(&syn(3, &[], &request("7", "0", "data"))).await.unwrap();
    client.write_all(&data(3, 0, b"there and back")).await.unwrap();
    client.write_all(&control(PING, 0, &[0, 0, 0, 1])).await.unwrap();
    client.write_all(&data(3, FIN, b"")).await.unwrap();
    let mut seen: HashMap<u32, (Vec<u8>, bool)> = HashMap::new();
    let (mut replies, mut pings) = (Vec::new(), 0);
    while !(seen.get(&1).is_some_and(|(_, ended)| *ended) && seen.get(&3).is_some_and(|(_, ended)| *ended)) {
        let frame = read_frame(&mut client).await.unwrap();
        match frame.kind {
            None => {
                let (bytes, ended) = seen.entry(frame.stream).or_default();
                bytes.extend(frame.payload);
                *ended |= frame.flags & FIN != 0;
            }
            Some(SYN_REPLY) => replies.push(frame.payload),
            Some(PING) => pings += 1,
            Some(other) => panic!("a frame of kind {other}"),
        }
    }
    assert_eq!(seen[&3].0, b"there and back");
    assert_eq!((seen[&1].0.len(), pings), (0, 1));
    let no_headers = [0, 4, 0, 0xfb, 0xff, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    assert_eq!(replies[0], [&[0, 0, 0, 1, 0x78, 1][..], &no_headers].concat());
    assert_eq!(replies[1], [&[0, 0, 0, 3][..], &no_headers].concat());

    client.write_all(&syn(5, &[], &request("8", "1", "data"))).await.unwrap();
    client.write_all(&syn(7, &[], &request("8", "1", "error"))).await.unwrap();
    let mut complaint: Vec<u8> = Vec::new();
    loop {
        let frame = read_frame(&mut client).await.unwrap();
        if frame.kind.is_none() && frame.stream == 7 {
            complaint.extend_from_slice(&frame.payload);
            if frame.flags & FIN != 0 {
                break;
            }
        }
    }
    assert_eq!(complaint, b"connection refused");
    client.write_all(&syn(9, &[], &[("port", "no number")])).await.unwrap();
    loop {
        let frame = read_frame(&mut client).await.unwrap();
        if frame.kind == Some(RST_STREAM) {
            assert_eq!(frame.payload, [0, 0, 0, 9, 0, 0, 0, 3]);
            break;
        }
    }
    drop(client);
    served.await.unwrap();
}

//! What a log looks like on disk.

use std::{fs, path::Path};

use super::*;

fn log_at(directory: &Path) -> Log {
    Log::open(fs::File::open(directory).unwrap().into(), "0.log".into()).unwrap()
}

/// The entries of a file without their times, which must be well formed.
fn entries(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let entry = |line: &str| {
        let (time, rest) = line.split_once(' ').unwrap();
        assert!(time.len() == 30 && time.starts_with("20") && time.ends_with('Z'), "{time}");
        rest.to_owned()
    };
    text.lines().map(entry).collect()
}

#[test]
fn times_are_rfc_3339_with_nanoseconds() {
    for (nanoseconds, text) in [
        (0, "1970-01-01T00:00:00.000000000Z"),
        (951_782_399_000_000_001, "2000-02-28T23:59:59.000000001Z"),
        (951_782_400_000_000_000, "2000-02-29T00:00:00.000000000Z"),
        (4_107_542_400_000_000_000, "2100-03-01T00:00:00.000000000Z"),
        (1_794_744_245_123_456_789, "2026-11-15T12:04:05.123456789Z"),
    ] {
        assert_eq!(timestamp(nanoseconds), text);
    }
}

#[test]
fn each_line_is_an_entry_and_streams_do_not_mix() {
    let place = tempfile::tempdir().unwrap();
    let mut log = log_at(place.path());
    let (mut out, mut err) = (Stream::new("stdout"), Stream::new("stderr"));
    log.write(&mut out, b"one\n\nthr");
    log.write(&mut err, b"bad\n");
    log.write(&mut out, b"ee\nrest");
    log.finish(&mut out);
    log.finish(&mut err);
    let expected = ["stdout F one", "stdout F ", "stderr F bad", "stdout F three", "stdout P rest"];
    assert_eq!(entries(&place.path().join("0.log")), expected);
}

#[test]
fn a_long_line_is_cut_into_partial_entries() {
    let place = tempfile::tempdir().unwrap();
    let mut log = log_at(place.path());
    let mut out = Stream::new("stdout");
    log.write(&mut out, &[b'a'; LONGEST]);
    log.write(&mut out, b"\n");
    log.write(&mut out, &vec![b'b'; 2 * LONGEST + 1]);
    log.write(&mut out, b"\n");
    let lengths: Vec<_> = entries(&place.path().join("0.log"))
        .iter()
        .map(|entry| (entry.as_bytes()[7], entry.len() - "stdout F ".len()))
        .collect();
    assert_eq!(lengths, [(b'F', LONGEST), (b'P', LONGEST), (b'P', LONGEST), (b'F', 1)]);
}

#[test]
fn a_full_log_becomes_an_old_file_and_the_oldest_goes() {
    let directory = tempfile::tempdir().unwrap();
    let mut log = log_at(directory.path());
    log.rotate_at = 100;
    let mut out = Stream::new("stdout");
    // Each file takes three lines.
    for number in 0..25 {
        log.write(&mut out, format!("line {number}\n").as_bytes());
    }
    let files: Vec<Vec<String>> =
        log_files(&directory.path().join("0.log")).map(|path| entries(&path)).collect();
    let lines = |from: u32, to: u32| (from..to).map(|number| format!("stdout F line {number}")).collect();
    let expected: Vec<Vec<String>> =
        [(24, 25), (21, 24), (18, 21), (15, 18), (12, 15)].map(|(from, to)| lines(from, to)).to_vec();
    assert_eq!(files, expected);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 5);
}

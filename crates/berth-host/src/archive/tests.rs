//! Archives against themselves and against GNU tar.
#![expect(clippy::single_range_in_vec_init, reason = "the pieces of a file are ranges, if only one")]

use std::{fs, os::unix::fs::MetadataExt as _, path::Path, time::Duration};

use super::*;

const SOON: Duration = Duration::from_secs(20);

fn file(path: &str, size: u64) -> Header {
    Header {
        path: path.as_bytes().to_vec(),
        kind: EntryKind::File,
        mode: 0o640,
        uid: 1000,
        gid: 2000,
        size,
        modified: (1_700_000_000, 0),
        device: (0, 0),
        link: Vec::new(),
        xattrs: Vec::new(),
        pieces: None,
    }
}

fn archive(entries: &[(Header, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (header, data) in entries {
        bytes.extend(encode(header));
        bytes.extend(data);
        bytes.resize(bytes.len() + padding(stored_length(header)), 0);
    }
    bytes.extend(end());
    bytes
}

/// Reads an archive in steps of so many bytes.
fn read(bytes: &[u8], step: usize) -> Result<Vec<(Header, Vec<u8>)>, Damaged> {
    let mut decoder = Decoder::default();
    let mut entries: Vec<(Header, Vec<u8>)> = Vec::new();
    let mut ended = 0;
    for chunk in bytes.chunks(step) {
        decoder.push(chunk);
        while let Some(event) = decoder.next_event()? {
            match event {
                Event::Entry(header) => entries.push((header, Vec::new())),
                Event::Data(offset, data) => {
                    let content = &mut entries.last_mut().unwrap().1;
                    let offset = usize::try_from(offset).unwrap();
                    if content.len() < offset {
                        content.resize(offset, 0);
                    }
                    content.extend_from_slice(&data);
                }
                Event::EntryEnd => ended += 1,
            }
        }
    }
    if !decoder.is_complete() {
        return Err(Damaged::new("cut off"));
    }
    assert_eq!(ended, entries.len(), "every entry has an end");
    Ok(entries)
}

fn varied() -> Vec<(Header, Vec<u8>)> {
    let long = format!("./{}/{}", "d".repeat(120), "f".repeat(200));
    let plain = |header: Header| (header, Vec::new());
    vec![
        plain(Header { kind: EntryKind::Directory, mode: 0o2755, ..file("./", 0) }),
        (file("./small", 5), b"hello".to_vec()),
        (Header { modified: (1_700_000_000, 123_456_789), ..file(&long, 512) }, vec![7; 512]),
        (Header { uid: 4_000_000_000, gid: 3_000_000, ..file("./owned", 1) }, vec![1]),
        plain(Header { kind: EntryKind::Symlink, link: vec![b'x'; 150], ..file("./link", 0) }),
        plain(Header { kind: EntryKind::HardLink, link: b"./small".to_vec(), ..file("./again", 0) }),
        plain(Header { kind: EntryKind::Character, device: (1, 3), ..file("./null", 0) }),
        plain(Header { kind: EntryKind::Fifo, ..file("./fifo", 0) }),
        (
            Header { xattrs: vec![(b"user.a".to_vec(), b"x=\ny\0".to_vec())], ..file("./tagged", 3) },
            b"abc".to_vec(),
        ),
        (file("./ünïcödé", 2), b"ok".to_vec()),
        plain(Header { modified: (-5, 500_000_000), ..file("./old", 0) }),
    ]
}

#[test]
fn what_is_written_is_read_back_whatever_the_steps() {
    let entries = varied();
    let bytes = archive(&entries);
    for step in [1, 7, 512, 1000, bytes.len()] {
        assert_eq!(read(&bytes, step).unwrap(), entries, "in steps of {step}");
    }
}

#[test]
fn holes_are_kept() {
    for (pieces, size) in
        [(vec![0..3, 4096..4100], 10_000), (vec![4096..8192], 8192), (vec![], 1 << 30), (vec![0..512], 1024)]
    {
        let header = Header { pieces: Some(pieces.clone()), ..file("./sparse", size) };
        let stored = usize::try_from(stored_length(&header)).unwrap();
        let bytes = archive(&[(header.clone(), vec![9; stored]), (file("./after", 1), vec![2])]);
        for step in [3, 512, bytes.len()] {
            let entries = read(&bytes, step).unwrap();
            assert_eq!(entries[0].0, header);
            for piece in &pieces {
                let range = usize::try_from(piece.start).unwrap()..usize::try_from(piece.end).unwrap();
                assert!(entries[0].1[range].iter().all(|&byte| byte == 9));
            }
            assert_eq!(entries[1], (file("./after", 1), vec![2]));
        }
    }
}

#[test]
fn damage_is_noticed_and_nothing_panics() {
    let bytes = archive(&varied());
    assert!(read(&bytes[..bytes.len() - 1024], 512).is_err(), "an archive that is cut off");
    let mut seed = 42_u32;
    for _ in 0..3000 {
        let mut broken = bytes.clone();
        for _ in 0..4 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let at = usize::try_from(seed >> 8).unwrap() % broken.len();
            broken[at] = u8::try_from(seed & 0xff).unwrap();
        }
        let _ = read(&broken, 300);
    }
    let mut wrong = bytes;
    wrong[0] ^= 1;
    assert!(read(&wrong, 512).unwrap_err().to_string().contains("checksum"));
}

#[test]
fn nonsense_in_sizes_and_maps_is_refused() {
    let huge = Header { pieces: Some(vec![0..10, 5..20]), ..file("./overlap", 100) };
    assert!(read(&archive(&[(huge, vec![0; 25])]), 512).is_err());
    let outside = Header { pieces: Some(vec![0..200]), ..file("./outside", 100) };
    assert!(read(&archive(&[(outside, vec![0; 200])]), 512).is_err());
    let mut many = vec![b'1'; 4096];
    many.extend_from_slice(&[b'\n'; 512]);
    let mut decoder = Decoder::default();
    let header = Header { pieces: Some(vec![]), ..file("./map", 1) };
    let mut bytes = encode(&header);
    bytes.truncate(bytes.len() - 512);
    bytes.extend(many);
    decoder.push(&bytes);
    assert!(loop {
        match decoder.next_event() {
            Err(_) => break true,
            Ok(None) => break false,
            Ok(Some(_)) => {}
        }
    });
}

fn tar(dir: &Path, args: &[&str]) -> String {
    let args = ["-C", dir.to_str().unwrap()].into_iter().chain(args.iter().copied());
    let output = crate::exec::run("tar", args, SOON).unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn gnu_tar_unpacks_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let sparse = Header { pieces: Some(vec![8192..8195]), ..file("./sparse", 1 << 20) };
    let mut entries = varied();
    entries.retain(|(header, _)| header.path != b"./old");
    entries.push((sparse, b"mid".to_vec()));
    fs::write(dir.path().join("a.tar"), archive(&entries)).unwrap();
    fs::create_dir(dir.path().join("out")).unwrap();
    let packed = dir.path().join("a.tar");
    tar(&dir.path().join("out"), &["--xattrs", "-xpf", packed.to_str().unwrap()]);
    let at = |name: &str| dir.path().join("out").join(name);
    assert_eq!(fs::read_to_string(at("small")).unwrap(), "hello");
    let small = fs::metadata(at("small")).unwrap();
    assert_eq!((small.uid(), small.gid(), small.mode() & 0o7777), (1000, 2000, 0o640));
    assert_eq!(small.ino(), fs::metadata(at("again")).unwrap().ino());
    let long = fs::metadata(at(&format!("{}/{}", "d".repeat(120), "f".repeat(200)))).unwrap();
    assert_eq!((long.len(), long.mtime(), long.mtime_nsec()), (512, 1_700_000_000, 123_456_789));
    assert_eq!(fs::metadata(at("owned")).unwrap().uid(), 4_000_000_000);
    assert_eq!(fs::read_link(at("link")).unwrap().as_os_str().len(), 150);
    assert_eq!(fs::symlink_metadata(at("null")).unwrap().rdev(), 0x103);
    let sparse = fs::read(at("sparse")).unwrap();
    assert_eq!((sparse.len(), &sparse[8192..8195]), (1 << 20, &b"mid"[..]));
    assert!(fs::metadata(at("sparse")).unwrap().blocks() < 64);
}

#[test]
fn what_gnu_tar_writes_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("in");
    let deep = source.join("d".repeat(120)).join("e".repeat(100));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("file"), "deep").unwrap();
    fs::write(source.join("one"), "1").unwrap();
    fs::hard_link(source.join("one"), source.join("two")).unwrap();
    std::os::unix::fs::symlink("one", source.join("link")).unwrap();
    let hole = fs::File::create(source.join("hole")).unwrap();
    hole.set_len(1 << 20).unwrap();
    for format in ["gnu", "pax", "ustar", "v7"] {
        let packed = dir.path().join("a.tar").to_str().unwrap().to_owned();
        let mut args = vec![format!("--format={format}"), "-cf".into(), packed];
        if format == "pax" {
            args.push("--sparse".into());
        }
        if format == "ustar" || format == "v7" {
            args.push(format!("--exclude={}", "d".repeat(120)));
        }
        args.push(".".into());
        tar(&source, &args.iter().map(String::as_str).collect::<Vec<_>>());
        let entries = read(&fs::read(dir.path().join("a.tar")).unwrap(), 700).unwrap();
        let find = |end: &str| {
            entries
                .iter()
                .find(|(header, _)| header.path.ends_with(end.as_bytes()))
                .unwrap_or_else(|| panic!("{end}"))
        };
        assert_eq!(find("./link").0.link, b"one", "{format}");
        let linked = entries.iter().filter(|(header, _)| header.kind == EntryKind::HardLink).count();
        assert_eq!(linked, 1, "{format}");
        assert_eq!(find("./hole").0.size, 1 << 20, "{format}");
        assert_eq!(find("./hole").0.pieces.is_some(), format == "pax");
        if format == "gnu" || format == "pax" {
            assert_eq!(find("/file").1, b"deep", "{format}");
        }
    }
}

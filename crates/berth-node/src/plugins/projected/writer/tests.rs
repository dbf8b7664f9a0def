//! One version or the next, whatever happens in between: crashes, readers, hostile links.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::super::tests::mode;
use super::*;

fn file(text: &str) -> File {
    File { bytes: text.as_bytes().to_vec(), mode: 0o640, owner: None }
}

fn tree(files: &[(&str, &str)]) -> Tree {
    files.iter().map(|(path, text)| ((*path).to_owned(), file(text))).collect()
}

/// What a reader finds by the visible names: path and content of every file, not through `..` names.
fn visible(volume: &Path) -> Vec<(String, String)> {
    fn into(directory: &Path, prefix: &str, found: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(directory).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let path = directory.join(&name);
            if name.starts_with("..") {
                continue;
            }
            let shown = format!("{prefix}{name}");
            match fs::metadata(&path) {
                Ok(what) if what.is_dir() => into(&path, &format!("{shown}/"), found),
                Ok(_) => found.push((shown, fs::read_to_string(&path).unwrap())),
                Err(_) => found.push((shown, "dangling".to_owned())),
            }
        }
    }
    let mut found = Vec::new();
    into(volume, "", &mut found);
    found.sort();
    found
}

fn expected(tree: &Tree) -> Vec<(String, String)> {
    tree.iter().map(|(path, file)| (path.clone(), String::from_utf8(file.bytes.clone()).unwrap())).collect()
}

/// The names at the top that are not for readers.
fn inner(volume: &Path) -> Vec<String> {
    let names = fs::read_dir(volume).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("..")).collect();
    names.sort();
    names
}

fn assert_holds(volume: &Path, tree: &Tree) {
    assert_eq!(visible(volume), expected(tree));
    let inner = inner(volume);
    assert_eq!(inner.len(), 2, "one version and the link to it: {inner:?}");
    assert!(is_version(&inner[0]) && inner[1] == DATA, "{inner:?}");
    assert_eq!(fs::read_link(volume.join(DATA)).unwrap().to_str(), Some(inner[0].as_str()));
}

#[test]
fn files_lie_behind_links_as_readers_expect() {
    let directory = tempfile::tempdir().unwrap();
    let volume = Dir::open(directory.path()).unwrap();
    let files = tree(&[("a", "1"), ("dir/b", "2"), ("dir/deeper/c", "3")]);
    assert_eq!(write(&volume, &files, None).unwrap(), Change::Made);
    assert_holds(directory.path(), &files);
    assert_eq!(fs::read_link(directory.path().join("a")).unwrap(), Path::new("..data/a"));
    assert_eq!(fs::read_link(directory.path().join("dir")).unwrap(), Path::new("..data/dir"));
    assert_eq!(mode(&directory.path().join("..data/a")), 0o640);
    assert_eq!(mode(&directory.path().join("..data/dir/deeper")), 0o755);
    assert_eq!(mode(&directory.path().join(&inner(directory.path())[0])), 0o755);

    let empty = Tree::new();
    write(&volume, &empty, None).unwrap();
    assert_holds(directory.path(), &empty);
}

#[test]
fn nothing_is_written_when_nothing_changed_but_links_are_repaired() {
    let directory = tempfile::tempdir().unwrap();
    let volume = Dir::open(directory.path()).unwrap();
    let files = tree(&[("a", "1"), ("dir/b", "2")]);
    write(&volume, &files, None).unwrap();
    let before = inner(directory.path());
    fs::remove_file(directory.path().join("a")).unwrap();
    fs::remove_file(directory.path().join("dir")).unwrap();
    symlink("/etc", directory.path().join("dir")).unwrap();
    symlink("..data/old", directory.path().join("old")).unwrap();
    assert_eq!(write(&volume, &files, None).unwrap(), Change::AlreadyTrue);
    assert_eq!(inner(directory.path()), before);
    assert_holds(directory.path(), &files);

    for changed in
        [tree(&[("a", "2"), ("dir/b", "2")]), tree(&[("a", "2")]), tree(&[("a/b", "2")]), tree(&[("z", "")])]
    {
        assert_eq!(write(&volume, &changed, None).unwrap(), Change::Made);
        assert_holds(directory.path(), &changed);
    }
}

#[test]
fn a_crash_after_any_step_leaves_one_version_whole_and_is_made_good() {
    let old = tree(&[("a", "old"), ("gone/x", "old"), ("same/n", "old")]);
    let new = tree(&[("a", "new"), ("same/n", "new"), ("b", "new"), ("c/d", "new")]);
    for first in [None, Some(&old)] {
        for stop in 0.. {
            let directory = tempfile::tempdir().unwrap();
            let volume = Dir::open(directory.path()).unwrap();
            if let Some(first) = first {
                write(&volume, first, None).unwrap();
            }
            let (mut count, mut at) = (0, "the end");
            let result = write_in_steps(&volume, &new, None, &mut |step| {
                count += 1;
                if count > stop {
                    at = step;
                    return Err(Error::new("crash", io::Error::other("here")));
                }
                Ok(())
            });
            // Whoever reads through `..data` sees one version or the other.
            let seen = match fs::read_to_string(directory.path().join("..data/a")) {
                Ok(text) => {
                    let tree = if text == "old" { &old } else { &new };
                    let version = Dir::open(&directory.path().join(DATA)).unwrap();
                    let mut found = BTreeSet::new();
                    list(&version, "", &mut found).unwrap();
                    assert!(found.iter().eq(tree.keys()), "after {at}: {found:?}");
                    for path in tree.keys() {
                        assert_eq!(
                            fs::read_to_string(directory.path().join(DATA).join(path)).unwrap(),
                            text,
                            "after {at}"
                        );
                    }
                    Some(text)
                }
                Err(_) => None,
            };
            assert!(seen.is_some() || first.is_none(), "after {at} there is no version");
            // Then the next call completes it, to whatever is wanted by then.
            for wanted in [&new, &old] {
                write(&volume, wanted, None).unwrap();
                assert_holds(directory.path(), wanted);
            }
            if result.is_ok() {
                assert!(stop > 8, "the steps were counted");
                break;
            }
        }
    }
}

#[test]
fn a_reader_never_sees_a_mix_of_two_versions() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let volume = Dir::open(directory.path()).unwrap();
    let names = ["a", "b/c", "b/d", "e"];
    let version = |number: usize| {
        tree(
            &names
                .map(|name| (name, number.to_string()))
                .each_ref()
                .map(|(name, text)| (*name, text.as_str())),
        )
    };
    write(&volume, &version(0), None).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut reads, mut newest) = (0, 0);
            while !done.load(Ordering::Relaxed) || reads < 100 || newest < 1000 {
                // As a program reads a consistent set: it holds the directory open.
                let Ok(current) = volume.link_target(DATA).map(Option::unwrap) else { panic!("no link") };
                let Ok(directory) = volume.dir(&current) else { continue };
                let texts: Result<Vec<String>> = names
                    .iter()
                    .map(|name| {
                        let file = directory.open_file(name, false)?;
                        io::read_to_string(file).map_err(|error| Error::new("read", error))
                    })
                    .collect();
                // A version that is being removed is not there any more, which is not a mix.
                let Ok(texts) = texts else { continue };
                assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
                let number: usize = texts[0].parse().unwrap();
                assert!(number >= newest, "versions go forward only");
                (reads, newest) = (reads + 1, number);
                // And a name at the top always leads to a whole file.
                let one = fs::read_to_string(directory.path().join("a"));
                assert!(one.is_err() || !one.unwrap().is_empty());
            }
            newest
        });
        for number in 1..=1000 {
            write(&volume, &version(number), None).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        assert_eq!(reader.join().unwrap(), 1000);
    });
    assert_holds(directory.path(), &version(1000));
}

#[test]
fn planted_links_lead_nothing_outside() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("a"), "untouched").unwrap();
    let target = outside.path().to_str().unwrap();
    for planted in [DATA, NEXT_DATA, "a", "dir", "..2026_01_01_00_00_00.5"] {
        let directory = tempfile::tempdir().unwrap();
        let volume = Dir::open(directory.path()).unwrap();
        symlink(target, directory.path().join(planted)).unwrap();
        let files = tree(&[("a", "1"), ("dir/a", "2")]);
        write(&volume, &files, None).unwrap();
        assert_eq!(visible(directory.path()), expected(&files), "{planted}");
        assert_eq!(fs::read_to_string(outside.path().join("a")).unwrap(), "untouched");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1, "{planted}");
    }
    // A link that looks like a version of ours but is one to elsewhere.
    let directory = tempfile::tempdir().unwrap();
    let volume = Dir::open(directory.path()).unwrap();
    symlink(target, directory.path().join("..2026_01_01_00_00_00.5")).unwrap();
    symlink("..2026_01_01_00_00_00.5", directory.path().join(DATA)).unwrap();
    let files = tree(&[("a", "1")]);
    let _ = write(&volume, &files, None);
    assert_eq!(fs::read_to_string(outside.path().join("a")).unwrap(), "untouched");
}

#[test]
fn owner_and_group_are_there_before_anybody_sees_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let volume = Dir::open(directory.path()).unwrap();
    let mut files = tree(&[("a", "1")]);
    files.insert("token".to_owned(), File { bytes: b"t".to_vec(), mode: 0o600, owner: Some(1234) });
    for text in ["1", "2"] {
        files.insert("a".to_owned(), file(text));
        write_in_steps(&volume, &files, Some(4321), &mut |step| {
            if step == "next link" {
                let version = directory.path().join(fs::read_link(directory.path().join(NEXT_DATA)).unwrap());
                let stat = fs::metadata(version.join("token")).unwrap();
                assert_eq!((stat.uid(), stat.gid(), stat.mode() & 0o7777), (1234, 4321, 0o640));
                let stat = fs::metadata(version.join("a")).unwrap();
                assert_eq!((stat.uid(), stat.gid(), stat.mode() & 0o7777), (0, 4321, 0o640));
            }
            Ok(())
        })
        .unwrap();
    }
    assert_eq!(fs::symlink_metadata(directory.path().join("token")).unwrap().uid(), 1234);
    assert_eq!(fs::metadata(directory.path()).unwrap().gid(), 4321);
}

#[test]
fn a_directory_for_another_volume_stays() {
    let directory = tempfile::tempdir().unwrap();
    let volume = Dir::open(directory.path()).unwrap();
    fs::create_dir(directory.path().join("nested")).unwrap();
    fs::create_dir(directory.path().join("..nested")).unwrap();
    write(&volume, &tree(&[("a", "1"), ("nested/b", "2")]), None).unwrap();
    write(&volume, &tree(&[("a", "2")]), None).unwrap();
    assert!(directory.path().join("nested").is_dir() && directory.path().join("..nested").is_dir());
    assert!(!directory.path().join("nested").is_symlink());
}

#[test]
fn only_names_of_versions_are_versions() {
    let directory = tempfile::tempdir().unwrap();
    let made = new_version(&Dir::open(directory.path()).unwrap()).unwrap();
    assert!(is_version(&made), "{made}");
    for name in [
        "..data",
        "..2026",
        "..a_b_c_d_e_f.1",
        "2026_01_01_00_00_00.1",
        "..2026_01_01_00_00_00.",
        "..2026_01_01_00_00_00",
        "..2026_01_01_00_00_00.1/../x",
    ] {
        assert!(!is_version(name), "{name}");
    }
}

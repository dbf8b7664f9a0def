//! What a journal gives back after every kind of bad luck.

use std::fs;

use super::*;

fn open(path: &std::path::Path) -> (Journal, Damage, BTreeMap<String, String>) {
    let mut records = BTreeMap::new();
    let (journal, damage) = Journal::open(&Dir::open(path).unwrap(), "j", &mut |key, json| {
        records.insert(key.to_owned(), String::from_utf8(json.to_vec()).unwrap());
    })
    .unwrap();
    (journal, damage, records)
}

fn put<'a>(key: &'a str, json: &'a str) -> Entry<'a> {
    Entry::Put { key, json: json.as_bytes() }
}

#[test]
fn the_last_line_of_a_key_counts_and_removed_keys_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, ..) = open(dir.path());
    journal.write(&[put("a", "1"), put("b b", r#"{"x":"\n"}"#), put("c", "3")]).unwrap();
    journal.write(&[put("a", "2"), Entry::Remove { key: "c" }]).unwrap();
    drop(journal);
    let (_, damage, records) = open(dir.path());
    assert_eq!(damage.lines, 0);
    assert_eq!(records, BTreeMap::from([("a".into(), "2".into()), ("b b".into(), r#"{"x":"\n"}"#.into())]));
}

#[test]
fn half_a_last_line_is_cut_off_wherever_the_writer_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, ..) = open(dir.path());
    journal.write(&[put("a", "1")]).unwrap();
    let whole = journal.length;
    journal.write(&[put("b", r#"{"long":"value"}"#)]).unwrap();
    let end = journal.length;
    drop(journal);
    let bytes = fs::read(dir.path().join("j")).unwrap();
    for cut in whole..end {
        fs::write(dir.path().join("j"), &bytes[..usize::try_from(cut).unwrap()]).unwrap();
        fs::remove_file(dir.path().join("j.mark")).unwrap();
        let (mut journal, damage, records) = open(dir.path());
        // Without its line break alone, the line is whole.
        let left = if cut == end - 1 { 2 } else { 1 };
        assert_eq!((damage.lines, records.len()), (0, left), "cut at {cut}");
        journal.write(&[put("c", "3")]).unwrap();
        drop(journal);
        let (_, damage, records) = open(dir.path());
        assert_eq!((damage.lines, records.len()), (0, left + 1), "appended after a cut at {cut}");
    }
}

#[test]
fn room_written_ahead_is_no_content_whether_the_writer_stopped_or_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, ..) = open(dir.path());
    journal.write(&[put("a", "1"), put("b", "2")]).unwrap();
    let (end, running) = (journal.length, fs::read(dir.path().join("j")).unwrap());
    drop(journal);
    let stopped = fs::read(dir.path().join("j")).unwrap();
    assert_eq!(stopped.len() as u64, end, "a stopped journal is text and nothing else");
    let room = running.len() - stopped.len();
    assert!(running[stopped.len()..].iter().all(|byte| *byte == 0), "{room} bytes ahead");
    // Killed with a whole line, with half a line, and with the next line after room that nothing was written to.
    let mut half = running.clone();
    half.truncate(stopped.len() - 3);
    half.resize(running.len().max(stopped.len() + 5), 0);
    let mut after = [&stopped[..], &[0; 4096][..]].concat();
    after.extend_from_slice(&stopped[HEADER.len()..]);
    for (content, left) in [(running, 2), (half, 1), (after, 2)] {
        fs::write(dir.path().join("j"), content).unwrap();
        fs::remove_file(dir.path().join("j.mark")).unwrap();
        let (mut journal, damage, records) = open(dir.path());
        assert_eq!((damage.lines, records.len()), (0, left));
        journal.write(&[put("c", "3")]).unwrap();
        drop(journal);
        let (_, damage, records) = open(dir.path());
        assert_eq!((damage.lines, records.len()), (0, left + 1));
    }
}

#[test]
fn a_damaged_line_is_set_aside_and_the_others_live_on() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, ..) = open(dir.path());
    journal.write(&[put("a", "1"), put("b", "2"), put("c", "3")]).unwrap();
    journal.sync().unwrap();
    drop(journal);
    let text = fs::read_to_string(dir.path().join("j")).unwrap();
    fs::write(dir.path().join("j"), text.replace(r#"["b",2]"#, r#"["b",9]"#)).unwrap();
    let (_, damage, records) = open(dir.path());
    assert_eq!(damage.lines, 1);
    assert_eq!(records.keys().collect::<Vec<_>>(), ["a", "c"]);
    let kept: Vec<_> = fs::read_dir(dir.path().join("corrupt")).unwrap().collect();
    assert_eq!(kept.len(), 1);
    let (_, damage, records) = open(dir.path());
    assert_eq!((damage.lines, records.len()), (0, 2), "the damage is gone from the journal itself");
}

#[test]
fn damage_anywhere_never_stops_the_journal_from_opening() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, ..) = open(dir.path());
    journal.write(&[put("a", "1"), put("b", r#"{"k":[1,2]}"#), put("c", "3")]).unwrap();
    drop(journal);
    let bytes = fs::read(dir.path().join("j")).unwrap();
    for index in 0..bytes.len() {
        for flipped in [bytes[index] ^ 0x20, 0, b'\n'] {
            let mut damaged = bytes.clone();
            damaged[index] = flipped;
            fs::write(dir.path().join("j"), &damaged).unwrap();
            let (_, _, records) = open(dir.path());
            // A lost line break costs two lines, anything else one.
            assert!(!records.is_empty(), "byte {index} set to {flipped}: {records:?}");
        }
    }
}

#[test]
fn a_journal_that_is_mostly_dead_is_rewritten_and_keeps_its_records() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, ..) = open(dir.path());
    let big = format!("{:?}", "x".repeat(1000));
    for round in 0..6000 {
        let key = (round % 10).to_string();
        journal.write(&[put(&key, &big)]).unwrap();
        journal.write(&[put("round", &round.to_string())]).unwrap();
    }
    assert!(journal.length <= 3 * SMALL + 2000, "{} bytes for 11 records", journal.length);
    drop(journal);
    let (_, damage, records) = open(dir.path());
    assert_eq!((damage.lines, records.len()), (0, 11));
    assert_eq!(records["round"], "5999");
}

#[tokio::test]
async fn callers_that_wait_together_share_a_sync() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, ..) = open(dir.path());
    let directories = vec![Dir::open(dir.path()).unwrap()];
    let commit = std::sync::Arc::new(GroupCommit::start(journal, directories).unwrap());
    let mut waiting = tokio::task::JoinSet::new();
    for index in 0..500 {
        let commit = commit.clone();
        waiting.spawn(
            async move { commit.put(format!("k{index}"), b"1".to_vec(), Barrier::Directory(0)).await },
        );
    }
    while let Some(done) = waiting.join_next().await {
        done.unwrap().unwrap();
    }
    assert!(commit.commits() < 250, "{} syncs for 500 callers", commit.commits());
    drop(commit);
    assert_eq!(open(dir.path()).2.len(), 500);
}

#[test]
fn what_is_written_and_removed_during_a_rewrite_is_in_the_new_file() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, ..) = open(dir.path());
    let mut model = BTreeMap::new();
    let (mut rewrites, mut concurrent, mut was_rewriting) = (0, 0, false);
    let mut seed = 7u64;
    while rewrites < 4 || concurrent < 100 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let key = format!("k{}", (seed >> 33) % 500);
        if (seed >> 20).is_multiple_of(4) {
            journal.write(&[Entry::Remove { key: &key }]).unwrap();
            model.remove(&key);
        } else {
            let json = format!("{:?}", format!("{seed}-{}", "x".repeat(4000)));
            journal.write(&[put(&key, &json)]).unwrap();
            model.insert(key, json);
        }
        concurrent += usize::from(journal.rewrite.is_some());
        rewrites += usize::from(was_rewriting && journal.rewrite.is_none());
        was_rewriting = journal.rewrite.is_some();
    }
    let live: u64 = journal.live.values().map(|span| u64::from(span.length)).sum();
    assert_eq!(live, journal.live_bytes);
    drop(journal);
    let (_, damage, records) = open(dir.path());
    assert_eq!(damage.lines, 0);
    assert!(records == model, "{} records, {} expected", records.len(), model.len());
}

#[test]
fn a_journal_dropped_during_a_rewrite_opens_as_if_there_had_been_none() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, ..) = open(dir.path());
    let big = format!("{:?}", "x".repeat(10_000));
    while journal.rewrite.is_none() {
        journal.write(&[put("a", &big), put("b", "1")]).unwrap();
    }
    drop(journal);
    assert!(dir.path().join("j.new").exists(), "the copy was under way");
    let (_, damage, records) = open(dir.path());
    assert_eq!((damage.lines, records.len()), (0, 2));
    assert!(!dir.path().join("j.new").exists());
}

#[test]
fn line_breaks_in_json_do_not_break_lines() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, ..) = open(dir.path());
    journal.write(&[put("a", "{\n  \"b\": 1\n}")]).unwrap();
    drop(journal);
    let (_, damage, records) = open(dir.path());
    assert_eq!((damage.lines, records["a"].as_str()), (0, "{   \"b\": 1 }"));
}

/// A small journal whose every write was synced: a key that was changed, one that was removed, one that is new. Its files are in
/// memory, so that the many syncs of these tests take no time.
struct Small {
    journal: Vec<u8>,
    mark: Vec<u8>,
}

fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

impl Small {
    fn make(is_rewritten: bool) -> Self {
        let dir = in_memory();
        let (mut journal, ..) = open(dir.path());
        let writes: [&[Entry<'_>]; 5] = [
            &[put("a", "1"), put("gone", "1")],
            &[put("b", r#"{"k":[1,["x"]]}"#)],
            &[put("a", "2")],
            &[Entry::Remove { key: "gone" }, put("new", "3")],
            &[put("last", "4")],
        ];
        for (index, write) in writes.into_iter().enumerate() {
            if is_rewritten && index == 3 {
                journal.rewrite_now().unwrap();
            }
            journal.write(write).unwrap();
            journal.sync().unwrap();
        }
        drop(journal);
        Self {
            journal: fs::read(dir.path().join("j")).unwrap(),
            mark: fs::read(dir.path().join("j.mark")).unwrap(),
        }
    }

    /// What is found after damage, which must be reported if anything is not as it was.
    fn damaged(&self, journal: &[u8], what: &str) -> (Damage, BTreeMap<String, String>) {
        let (damage, records) = self.reopened(journal, what);
        assert!(records == whole() || damage.is_damaged(), "{what}: {records:?} without a word");
        (damage, records)
    }

    /// What is found in this file: the same when it is opened again.
    fn reopened(&self, journal: &[u8], what: &str) -> (Damage, BTreeMap<String, String>) {
        let dir = in_memory();
        fs::write(dir.path().join("j"), journal).unwrap();
        fs::write(dir.path().join("j.mark"), &self.mark).unwrap();
        let (mut opened, damage, records) = open(dir.path());
        // What was found is found again, and new records are kept.
        opened.write(&[put("after", "5")]).unwrap();
        opened.sync().unwrap();
        drop(opened);
        let (_, again, found) = open(dir.path());
        assert_eq!((again.lines, again.missing), (0, 0), "{what}: reported once");
        assert_eq!(again.is_damaged(), damage.is_damaged(), "{what}: remembered until somebody sees to it");
        let mut expected = records.clone();
        expected.insert("after".into(), "5".into());
        assert_eq!(found, expected, "{what}");
        (damage, records)
    }
}

fn whole() -> BTreeMap<String, String> {
    let records = [("a", "2"), ("b", r#"{"k":[1,["x"]]}"#), ("last", "4"), ("new", "3")];
    records.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

#[test]
fn no_changed_byte_brings_an_older_state_back() {
    for is_rewritten in [false, true] {
        let small = Small::make(is_rewritten);
        for index in 0..small.journal.len() {
            for changed in [small.journal[index] ^ 1, small.journal[index] ^ 0x20, 0, b'\n'] {
                if changed == small.journal[index] {
                    continue;
                }
                let mut journal = small.journal.clone();
                journal[index] = changed;
                let what = format!("byte {index} is {changed}, rewritten: {is_rewritten}");
                let (damage, records) = small.damaged(&journal, &what);
                for (key, value) in &records {
                    assert_eq!(whole().get(key), Some(value), "{what}: {key} of an older state");
                }
                // A key without an earlier line cannot be told if its only line is damaged where the key stands.
                let is_noticed =
                    is_rewritten || records.contains_key("a") || damage.quarantined.contains("a");
                assert!(is_noticed, "{what}: a is not quarantined: {damage:?}");
            }
        }
    }
}

#[test]
fn an_end_that_is_cut_off_is_noticed_wherever_it_begins() {
    for is_rewritten in [false, true] {
        let small = Small::make(is_rewritten);
        for length in 0..small.journal.len() {
            let what = format!("cut at {length} of {}", small.journal.len());
            let (damage, records) = small.damaged(&small.journal[..length], &what);
            // Only the last line break is of no use.
            assert_eq!(damage.is_damaged(), length + 1 < small.journal.len(), "{what}");
            assert_eq!(records == whole(), !damage.is_damaged(), "{what}");
        }
    }
}

#[test]
fn a_piece_that_is_overwritten_with_zeros_is_noticed() {
    let small = Small::make(false);
    for start in HEADER.len()..small.journal.len() {
        for length in [1, 100, 512] {
            let end = (start + length).min(small.journal.len());
            let mut journal = small.journal.clone();
            journal[start..end].fill(0);
            small.damaged(&journal, &format!("zeros from {start} to {end}"));
        }
    }
}

#[test]
fn a_mark_that_is_damaged_or_gone_harms_nothing() {
    let mut small = Small::make(false);
    let mark = small.mark.clone();
    for index in 0..mark.len() {
        small.mark = mark.clone();
        small.mark[index] ^= 0x20;
        let (damage, _) = small.damaged(&small.journal, &format!("byte {index} of the mark"));
        assert!(!damage.is_damaged(), "{damage:?}");
    }
    small.mark.clear();
    assert!(!small.damaged(&small.journal, "an empty mark").0.is_damaged());
}

#[test]
fn what_a_writer_left_that_was_killed_before_it_was_synced_is_no_damage() {
    let small = Small::make(false);
    let dir = in_memory();
    fs::write(dir.path().join("j"), &small.journal).unwrap();
    fs::write(dir.path().join("j.mark"), &small.mark).unwrap();
    let (mut journal, ..) = open(dir.path());
    journal.write(&[put("x", "1"), put("a", "9"), put("z", "3")]).unwrap();
    drop(journal);
    let written = fs::read(dir.path().join("j")).unwrap();
    let from = small.journal.len();
    // Cut anywhere, or with a hole of zeros anywhere, as when not all pages of the write reached the disk.
    let cuts = (from..written.len()).map(|length| written[..length].to_vec());
    let holes = (from..written.len()).flat_map(|start| {
        [1, 50, 200].map(|length| {
            let mut journal = written.clone();
            journal[start..(start + length).min(written.len())].fill(0);
            journal
        })
    });
    for (index, journal) in cuts.chain(holes).enumerate() {
        let (damage, mut records) = small.reopened(&journal, &format!("case {index}"));
        assert_eq!(damage, Damage::default(), "case {index}");
        // Each of the three was written or not.
        for (key, value) in [("x", "1"), ("z", "3")] {
            assert!(records.remove(key).is_none_or(|found| found == value), "case {index}");
        }
        if records["a"] == "9" {
            records.insert("a".into(), "2".into());
        }
        assert_eq!(records, whole(), "case {index}");
    }
}

#[test]
fn a_journal_of_an_earlier_version_opens_and_is_guarded_from_then_on() {
    let line = |body: &str| format!("{:08x} {body}\n", crc32fast::hash(body.as_bytes()));
    let old = format!("{OLD_HEADER}{}{}{}", line(r#"["a",1]"#), line(r#"["b",2]"#), line(r#"["a",3]"#));
    let dir = in_memory();
    fs::write(dir.path().join("j"), &old).unwrap();
    let (mut journal, damage, records) = open(dir.path());
    assert_eq!(damage, Damage::default());
    assert_eq!(records, BTreeMap::from([("a".into(), "3".into()), ("b".into(), "2".into())]));
    journal.write(&[put("c", "4")]).unwrap();
    journal.sync().unwrap();
    drop(journal);
    let bytes = fs::read(dir.path().join("j")).unwrap();
    let (mut journal, damage, records) = open(dir.path());
    assert_eq!((damage, records.len()), (Damage::default(), 3));
    journal.rewrite_now().unwrap();
    drop(journal);
    let (_, damage, records) = open(dir.path());
    assert_eq!((damage, records.len()), (Damage::default(), 3));
    // A line of the earlier version that is damaged, and the end that is cut off.
    let mut damaged = bytes.clone();
    damaged[old.len() - 3] ^= 1;
    fs::write(dir.path().join("j"), &damaged).unwrap();
    let (_, damage, records) = open(dir.path());
    assert_eq!((damage.lines, records.get("a")), (1, None), "{damage:?}");
    assert!(damage.quarantined.contains("a"));
}

#[test]
fn a_quarantined_key_is_reported_until_it_is_written_again() {
    let dir = in_memory();
    let (mut journal, ..) = open(dir.path());
    for value in ["1", "2"] {
        journal.write(&[put("a", value)]).unwrap();
        journal.sync().unwrap();
    }
    drop(journal);
    let path = dir.path().join("j");
    fs::write(&path, fs::read_to_string(&path).unwrap().replace(r#"["a",2]"#, r#"["a",7]"#)).unwrap();
    for _ in 0..2 {
        let (_, damage, records) = open(dir.path());
        assert_eq!((damage.quarantined, records.len()), (BTreeSet::from(["a".to_owned()]), 0));
    }
    let kept = fs::read_dir(dir.path().join("corrupt")).unwrap().next().unwrap().unwrap();
    let kept = fs::read_to_string(kept.path()).unwrap();
    assert!(kept.contains(r#"["a",7]"#) && kept.contains(r#"["a",1]"#), "both lines are kept: {kept}");
    let (mut journal, ..) = open(dir.path());
    journal.write(&[put("a", "3")]).unwrap();
    drop(journal);
    let (_, damage, records) = open(dir.path());
    assert_eq!((damage.quarantined.len(), records["a"].as_str()), (0, "3"));
}

#[test]
fn a_journal_can_be_read_while_it_is_written() {
    let dir = in_memory();
    let (mut journal, ..) = open(dir.path());
    journal.write(&[put("a", "1"), put("b", "2"), put("a", "3"), Entry::Remove { key: "b" }]).unwrap();
    assert_eq!(read(&dir.path().join("j")).unwrap(), BTreeMap::from([("a".into(), b"3".to_vec())]));
}

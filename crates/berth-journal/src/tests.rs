//! What a journal gives back after every kind of bad luck.

use std::{collections::BTreeMap, fs};

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
        let (mut journal, damage, records) = open(dir.path());
        assert_eq!((damage.lines, records.len()), (0, 1), "cut at {cut}");
        journal.write(&[put("c", "3")]).unwrap();
        drop(journal);
        let (_, damage, records) = open(dir.path());
        assert_eq!((damage.lines, records.len()), (0, 2), "appended after a cut at {cut}");
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

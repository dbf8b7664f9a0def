//! A store whose process is killed in the middle of its work, again and again.
//!
//! The test starts this very test binary once more, as a process that writes and prints what was acknowledged.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use super::*;

const CHILD: &str = "BERTH_STORE_CHILD";
const WRITERS: u64 = 16;

fn key(writer: u64, slot: u64) -> Key {
    pod(&format!("w{writer}-{slot}"))
}

/// One writer of the child: changes, removes and makes anew its own few objects, and prints each answer.
async fn write_forever(store: Store, writer: u64, start: u64) {
    let big = "x".repeat(3000);
    for round in start.. {
        let key = key(writer, round % 5);
        let written = match store.get(&key) {
            Some(_) if round % 7 == 0 => delete(&store, key.clone()).await,
            Some(object) => {
                store
                    .write(key.clone(), Expect::Revision(object.revision), text(&format!("{round} {big}")))
                    .await
            }
            None => store.write(key.clone(), Expect::Absent, text(&format!("{round} {big}"))).await,
        };
        let revision = written.unwrap().revision;
        let state = if store.get(&key).is_some() { "put" } else { "gone" };
        // One write call: lines of several threads must not mix.
        println!("{} {revision} {state}", key.name);
    }
}

#[test]
fn the_child_of_the_kill_test() {
    let Ok(dir) = std::env::var(CHILD) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let (store, opened) = open(Path::new(&dir));
        assert_eq!(opened.damaged, 0);
        println!("revision {}", opened.revision);
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| tokio::spawn(write_forever(store.clone(), writer, opened.revision)))
            .collect();
        for writer in writers {
            writer.await.unwrap();
        }
    });
}

#[expect(clippy::disallowed_methods, reason = "the process is there to be killed")]
fn start(dir: &Path) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "store::kill::the_child_of_the_kill_test", "--nocapture"])
        .env(CHILD, dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What the child said before and while it was killed: the newest revision of every object, and its state.
#[derive(Default)]
struct Acknowledged {
    objects: HashMap<String, (u64, bool)>,
    newest: u64,
}

impl Acknowledged {
    fn read(&mut self, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["revision", revision] => {
                let revision: u64 = revision.parse().unwrap();
                assert!(revision >= self.newest, "went back from {} to {revision}", self.newest);
            }
            [name, revision, state @ ("put" | "gone")] => {
                let revision = revision.parse().unwrap();
                self.newest = self.newest.max(revision);
                let old = self.objects.insert(name.to_owned(), (revision, state == "put"));
                assert!(old.is_none_or(|(old, _)| old < revision), "{name} went back to {revision}");
            }
            _ => {}
        }
    }

    /// Each writer had at most one write under way when it was killed: that one may have been made or not.
    fn check(&mut self, store: &Store) {
        assert!(store.revision() >= self.newest, "went back from {} to {}", self.newest, store.revision());
        let mut under_way: HashMap<String, String> = HashMap::new();
        for (name, (revision, is_there)) in &mut self.objects {
            let found = store.get(&pod(name));
            if found.as_ref().map(|object| object.revision) == is_there.then_some(*revision) {
                continue;
            }
            if let Some(object) = &found {
                assert!(object.revision > *revision, "{name} is at {} again", object.revision);
                text_of(object);
            }
            let writer = name.split('-').next().unwrap().to_owned();
            let other = under_way.insert(writer, name.clone());
            assert!(other.is_none(), "{name} and {other:?} are not as acknowledged");
            (*revision, *is_there) = (found.as_ref().map_or(*revision, |it| it.revision), found.is_some());
        }
        self.newest = store.revision();
    }
}

#[test]
fn whatever_was_acknowledged_survives_kill_9_and_revisions_never_go_back() {
    let kills = std::env::var("BERTH_KILLS").map_or(30, |kills| kills.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged = Acknowledged::default();
    for kill in 0..kills {
        let mut child = start(dir.path());
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // From the first moments to several rewrites of the journal.
        let patience = [20, 150, 700, 3000][kill % 4] + kill * 7 % 100;
        for line in lines.by_ref().take(patience) {
            acknowledged.read(&line.unwrap());
        }
        child.kill().unwrap();
        for line in lines.map_while(Result::ok) {
            acknowledged.read(&line);
        }
        child.wait().unwrap();
        let (store, opened) = open(dir.path());
        assert_eq!(opened.damaged, 0, "after kill {kill}");
        acknowledged.check(&store);
    }
    assert!(acknowledged.newest > kills as u64 * 100);
}

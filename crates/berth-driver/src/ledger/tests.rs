//! The ledger across restarts and reboots.

use berth_core::{Access, AccessMode, VolumeCapability};

use super::*;

const BOOT_ID: &str = "5e2f";

fn open(directory: &tempfile::TempDir) -> Ledger {
    Ledger::open(&Dir::open(directory.path()).unwrap(), BOOT_ID).unwrap()
}

fn id(text: &str) -> VolumeId {
    text.parse().unwrap()
}

fn capability() -> VolumeCapability {
    let access =
        Access::Mount { fs_type: "xfs".into(), flags: vec!["context=\"a,b\"".into()], group: Some(7) };
    VolumeCapability { access, mode: AccessMode::SingleNodeMultiWriter }
}

fn staged(volume: &str) -> Staged {
    Staged {
        volume: id(volume),
        path: "/staging dir/ü".into(),
        capability: capability(),
        phase: Phase::Mounted,
    }
}

fn published(volume: &str, target: &str) -> Published {
    Published {
        volume: id(volume),
        handle: None,
        target: target.into(),
        capability: VolumeCapability { access: Access::Block, ..capability() },
        read_only: true,
        phase: Phase::Mounting,
    }
}

#[test]
fn what_is_noted_is_found_again_by_the_next_process() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = open(&directory);
    ledger.note_staged(staged("v")).unwrap();
    ledger.note_published(published("v", "/a")).unwrap();
    let inline = Published { handle: Some(id("h")), ..published("w", "/b") };
    ledger.note_published(inline.clone()).unwrap();
    drop(ledger);

    let ledger = open(&directory);
    assert_eq!(ledger.staged(&id("v")), Some(staged("v")));
    assert_eq!(ledger.published(&id("v")), [published("v", "/a")]);
    assert_eq!(ledger.published_at(Path::new("/b")), Some(inline));
    assert_eq!((ledger.backend_id(&id("h")), ledger.backend_id(&id("v"))), (id("w"), id("v")));
    ledger.forget_staged(&id("v")).unwrap();
    ledger.forget_published(Path::new("/b")).unwrap();
    drop(ledger);

    let ledger = open(&directory);
    assert_eq!(ledger.staged(&id("v")), None);
    assert_eq!(ledger.backend_id(&id("h")), id("h"));
    assert_eq!(ledger.everything(), (vec![], vec![published("v", "/a")]));
}

#[test]
fn the_latest_note_counts() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = open(&directory);
    ledger.note_published(published("v", "/a")).unwrap();
    ledger.note_published(Published { phase: Phase::Mounted, ..published("v", "/a") }).unwrap();
    assert_eq!(open(&directory).published_at(Path::new("/a")).unwrap().phase, Phase::Mounted);
    // A target changes hands as a whole.
    ledger.note_published(published("w", "/a")).unwrap();
    assert_eq!((ledger.published(&id("v")).len(), ledger.published(&id("w")).len()), (0, 1));
    assert_eq!(ledger.path_of(&id("v")), None);
}

#[test]
fn after_a_reboot_nothing_is_mounted_and_nothing_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    open(&directory).note_staged(staged("v")).unwrap();
    let dir = Dir::open(directory.path()).unwrap();
    assert_eq!(Ledger::open(&dir, "another").unwrap().everything(), (vec![], vec![]));
    assert_eq!(open(&directory).everything(), (vec![], vec![]), "not even with the old boot id");
}

#[test]
fn a_path_where_a_volume_is_used_is_found() {
    let ledger = Ledger::in_memory();
    assert_eq!(ledger.path_of(&id("v")), None);
    ledger.note_staged(staged("v")).unwrap();
    assert_eq!(ledger.path_of(&id("v")), Some("/staging dir/ü".into()));
    ledger.note_published(published("v", "/a")).unwrap();
    assert_eq!(ledger.path_of(&id("v")), Some("/a".into()));
    ledger.forget_published(Path::new("/a")).unwrap();
    ledger.forget_staged(&id("v")).unwrap();
    assert_eq!(ledger.path_of(&id("v")), None);
}

#[test]
fn a_record_that_makes_no_sense_costs_only_itself() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = open(&directory);
    ledger.note_staged(staged("v")).unwrap();
    ledger.state().write(Entry::Put { key: "target /x", json: b"{\"volume\":\"\"}" }).unwrap();
    drop(ledger);
    assert_eq!(open(&directory).everything(), (vec![staged("v")], vec![]));
}

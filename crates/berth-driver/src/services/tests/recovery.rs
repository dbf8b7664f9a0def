//! A driver killed at any point, and its successor.

use std::fs;

use berth_core::{Access, AccessMode, VolumeCapability, VolumeId};
use berth_csi::v1::node_server::Node as _;

use super::*;
use crate::{
    Error,
    ledger::{Phase, Published, Staged},
};

fn capability() -> VolumeCapability {
    let access = Access::Mount { fs_type: String::new(), flags: vec![], group: None };
    VolumeCapability { access, mode: AccessMode::SingleNodeWriter }
}

impl Bench {
    /// Writes into the ledger what a driver would have written before it was killed.
    fn note_published(&self, id: &str, target: &str, phase: Phase) {
        let published = Published {
            volume: id.parse().unwrap(),
            handle: None,
            target: self.path(target).into(),
            capability: capability(),
            read_only: false,
            phase,
        };
        self.driver.ledger.note_published(published).unwrap();
    }

    fn note_staged(&self, id: &str, phase: Phase) {
        let path = self.path("staging").into();
        let staged = Staged { volume: id.parse().unwrap(), path, capability: capability(), phase };
        self.driver.ledger.note_staged(staged).unwrap();
    }

    fn bind(&self, id: &str, target: &str) {
        fs::create_dir_all(self.path(target)).unwrap();
        let attributes = berth_host::mount::Attributes::default();
        berth_host::mount::bind(&self.fake.files(id), &PathBuf::from(self.path(target)), attributes).unwrap();
    }

    fn published(&self, id: &str) -> usize {
        self.driver.ledger.published(&id.parse().unwrap()).len()
    }
}

#[tokio::test]
async fn a_publication_killed_at_any_point_is_undone() {
    for phase in [Phase::Mounting, Phase::Unmounting] {
        for (state, made, bound) in
            [("nothing", false, false), ("a directory", true, false), ("all", true, true)]
        {
            let mut bench = Bench::new();
            let id = bench.staged("v").await;
            bench.note_published(&id, "target", phase);
            if made {
                fs::create_dir(bench.path("target")).unwrap();
            }
            if bound {
                bench.bind(&id, "target");
            }
            bench.restart().await;
            assert!(!fs::exists(bench.path("target")).unwrap(), "{phase:?} with {state}");
            assert_eq!(bench.published(&id), 0, "{phase:?} with {state}");
            bench.publish(&id, "target").await;
            bench.unpublish(&id, "target").await;
        }
    }
}

#[tokio::test]
async fn a_volume_killed_while_it_was_taken_down_to_grow_is_brought_up_again() {
    let mut bench = Bench::new();
    let id = bench.staged("v").await;
    bench.publish(&id, "one").await;
    bench.publish(&id, "two").await;
    bench.note_staged(&id, Phase::Remounting);
    berth_host::mount::unmount(bench.path("two").as_ref()).unwrap();
    bench.restart().await;
    assert!(is_mounted(&bench.path("one")) && is_mounted(&bench.path("two")));
    assert_eq!(bench.published(&id), 2);
    assert_eq!(bench.driver.ledger.staged(&id.parse().unwrap()).unwrap().phase, Phase::Mounted);
}

#[tokio::test]
async fn a_complete_publication_survives_a_kill() {
    let mut bench = Bench::new();
    let id = bench.staged("v").await;
    bench.publish(&id, "target").await;
    bench.restart().await;
    assert!(is_mounted(&bench.path("target")));
    bench.publish(&id, "target").await;
    let recovered = bench.fake.state().recovered.take().unwrap();
    assert_eq!(recovered.len(), 1);
    assert_eq!(
        (recovered[0].id.as_str(), recovered[0].staging.to_str().unwrap()),
        (id.as_str(), &*bench.path("staging"))
    );
    bench.unpublish(&id, "target").await;
    assert!(!fs::exists(bench.path("target")).unwrap());
}

#[tokio::test]
async fn a_publication_whose_mount_is_gone_is_forgotten() {
    let mut bench = Bench::new();
    let id = bench.staged("v").await;
    bench.note_published(&id, "target", Phase::Mounted);
    bench.restart().await;
    assert_eq!(bench.published(&id), 0);
}

#[tokio::test]
async fn a_staging_killed_at_any_point_is_undone_and_a_complete_one_kept() {
    for phase in [Phase::Mounting, Phase::Unmounting, Phase::Mounted] {
        let mut bench = Bench::new();
        let id = bench.staged("v").await;
        bench.note_staged(&id, phase);
        bench.restart().await;
        let kept = phase == Phase::Mounted;
        assert_eq!(bench.fake.state().staged.len(), usize::from(kept), "{phase:?}");
        assert_eq!(bench.driver.ledger.staged(&id.parse().unwrap()).is_some(), kept, "{phase:?}");
        assert_eq!(bench.fake.state().recovered.as_ref().unwrap().len(), usize::from(kept), "{phase:?}");
    }
}

#[tokio::test]
async fn a_volume_that_no_longer_exists_is_taken_down() {
    let mut bench = Bench::new();
    let id = bench.staged("v").await;
    bench.publish(&id, "target").await;
    bench.fake.state().volumes.clear();
    bench.restart().await;
    assert!(!fs::exists(bench.path("target")).unwrap());
    assert!(bench.fake.state().staged.is_empty());
    assert!(bench.driver.ledger.everything().0.is_empty());
}

#[tokio::test]
async fn what_cannot_be_undone_is_kept_and_stops_nothing_else() {
    let mut bench = Bench::new();
    let (id, other) = (bench.staged("v").await, bench.volume(create("other")).await);
    fs::write(bench.fake.files(&id).join("data"), "").unwrap();
    bench.note_published(&id, "busy", Phase::Unmounting);
    bench.bind(&id, "busy");
    let user = fs::File::open(bench.path("busy/data")).unwrap();
    bench.note_published(&other, "free", Phase::Unmounting);
    bench.bind(&other, "free");
    bench.restart().await;
    assert_eq!((bench.published(&id), bench.published(&other)), (1, 0));
    assert!(is_mounted(&bench.path("busy")));
    drop(user);
    bench.unpublish(&id, "busy").await;
}

#[tokio::test]
async fn foreign_files_at_a_half_made_target_are_left_and_forgotten() {
    let mut bench = Bench::new();
    let id = bench.staged("v").await;
    bench.note_published(&id, "target", Phase::Mounting);
    fs::create_dir(bench.path("target")).unwrap();
    fs::write(bench.path("target/data"), "precious").unwrap();
    bench.restart().await;
    assert_eq!(bench.published(&id), 0);
    assert_eq!(fs::read_to_string(bench.path("target/data")).unwrap(), "precious");
}

#[tokio::test]
async fn an_inline_volume_killed_while_it_was_published_is_removed() {
    let mut bench = Bench::new();
    let context = pairs(&[(berth_core::names::EPHEMERAL, "true")]);
    let request =
        v1::NodePublishVolumeRequest { volume_context: context, ..bench.publish_request("h", "target") };
    ok(bench.driver.node_publish_volume(of(request.clone())).await);
    let id: VolumeId = "vol-ephemeral-h".parse().unwrap();
    let published = bench.driver.ledger.published(&id).pop().unwrap();
    bench.driver.ledger.note_published(Published { phase: Phase::Mounting, ..published }).unwrap();
    bench.restart().await;
    assert!(bench.fake.state().volumes.is_empty() && !fs::exists(bench.path("target")).unwrap());

    // And one whose pod ended in another life is found by its name.
    ok(bench.driver.node_publish_volume(of(request)).await);
    berth_host::mount::unmount(&PathBuf::from(bench.path("target"))).unwrap();
    fs::remove_file(bench.path("state/node.journal")).unwrap();
    bench.restart().await;
    assert_eq!(bench.fake.state().volumes.len(), 1);
    bench.unpublish("h", "target").await;
    assert!(bench.fake.state().volumes.is_empty());
}

#[tokio::test]
async fn a_backend_that_cannot_work_stops_the_start() {
    let bench = Bench::new();
    bench.fake.fail("recover", || Error::State("the pool is gone".into()));
    assert!(bench.driver.recover().await.is_err());
}

//! What is said beside an image, on a real server.

#[path = "../../../../../testbed/nfs/ganesha.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod ganesha;

use std::{fs, path::PathBuf};

use berth_nfs::{Nfs, Options, Target};
use rustix::fs::{IFlags, ioctl_setflags};

use self::ganesha::Ganesha;
use super::*;

const LONG: Duration = Duration::from_secs(30);

/// A directory with an image, and the server that it is on.
struct Volume {
    share: Share,
    dir: Handle,
    path: PathBuf,
    _server: Ganesha,
}

impl Volume {
    async fn new() -> Self {
        let server = Ganesha::start(&[]).unwrap();
        let path = server.export().join("pvc-1");
        fs::create_dir(&path).unwrap();
        let options = Options::parse(&[format!("vers=4.2,{}", server.options())]).unwrap();
        let target = Target { server: "127.0.0.1".to_owned(), path: server.share("4.2"), options };
        let share = Nfs::new().share(&target).await.unwrap();
        let dir = share.open_dir("pvc-1").await.unwrap().handle;
        Self { share, dir, path, _server: server }
    }

    async fn take(&self, claim: &Claim) -> Result<()> {
        claim.take(&self.share, &self.dir).await
    }

    /// The claim that is there now of the same node.
    async fn there(&self, claim: &Claim) -> Option<Claim> {
        record::read_in(&self.share, &self.dir, &claim.key()).await.unwrap()
    }

    fn notes(&self) -> usize {
        let names = fs::read_dir(&self.path).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(COPY_PREFIX)).count()
    }

    async fn until_notes(&self, wanted: usize) {
        let found = async {
            while self.notes() != wanted {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, found).await.unwrap();
    }
}

fn claim(node: &str, read_only: bool) -> Claim {
    Claim { node: node.to_owned(), place: "/there".to_owned(), read_only, since: 1 }
}

#[tokio::test]
async fn a_claim_that_is_refused_leaves_what_the_node_has_said_before() {
    const READS: bool = true;
    const WRITES: bool = false;
    let volume = Volume::new().await;
    let (reader, writer) = (Some(READS), Some(WRITES));
    // What the node has said, what it says now, and who keeps it from that: another node, or else somebody who copies.
    let rows = [
        (None, WRITES, None),
        (None, WRITES, reader),
        (None, READS, writer),
        (reader, WRITES, None),
        (reader, WRITES, reader),
        (writer, WRITES, None),
        (writer, WRITES, writer),
        (writer, READS, writer),
    ];
    for (before, now, other) in rows {
        let row = format!("{before:?}, {now}, {other:?}");
        let before = before.map(|read_only| claim("node-1", read_only));
        if let Some(before) = &before {
            volume.take(before).await.unwrap();
        }
        match other {
            Some(read_only) => {
                let other = claim("node-2", read_only);
                record::write_in(&volume.share, &volume.dir, &other.key(), &other).await.unwrap();
            }
            None => fs::write(volume.path.join(".copied-by-0.json"), r#"{"doing":"a clone"}"#).unwrap(),
        }
        let wanted = Claim { since: 2, ..claim("node-1", now) };
        let refused = volume.take(&wanted).await;
        assert!(matches!(refused, Err(Error::Precondition(_))), "{row}: {refused:?}");
        assert_eq!(volume.there(&wanted).await, before, "{row}");
        for entry in fs::read_dir(&volume.path).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }
}

#[tokio::test]
async fn a_claim_says_no_less_than_before_until_the_image_is_mounted() {
    let volume = Volume::new().await;
    let (reads, writes) = (claim("node-1", true), claim("node-1", false));
    volume.take(&writes).await.unwrap();
    volume.take(&reads).await.unwrap();
    assert_eq!(volume.there(&reads).await.as_ref(), Some(&writes), "its kernel may write still");
    reads.note_mounted(&volume.share, &volume.dir).await.unwrap();
    assert_eq!(volume.there(&reads).await.as_ref(), Some(&reads));
    volume.take(&writes).await.unwrap();
    writes.note_mounted(&volume.share, &volume.dir).await.unwrap();
    assert_eq!(volume.there(&writes).await.as_ref(), Some(&writes));
    writes.give_back(&volume.share, &volume.dir).await.unwrap();
    assert_eq!(volume.there(&writes).await, None);
}

#[tokio::test]
async fn a_copy_that_is_stopped_leaves_no_note() {
    let volume = Volume::new().await;
    let copying = async {
        while_copying(&volume.share, &volume.dir, "0", "a clone", std::future::pending::<Result<()>>()).await
    };
    tokio::select! {
        _ = copying => panic!("it goes on for ever"),
        () = volume.until_notes(1) => {}
    }
    volume.until_notes(0).await;
}

#[tokio::test]
async fn an_image_beside_which_nothing_can_be_written_is_copied() {
    struct Immutable(fs::File);
    impl Drop for Immutable {
        fn drop(&mut self) {
            let _ = ioctl_setflags(&self.0, IFlags::empty());
        }
    }
    let volume = Volume::new().await;
    let dir = Immutable(fs::File::open(&volume.path).unwrap());
    ioctl_setflags(&dir.0, IFlags::IMMUTABLE).unwrap();
    let written = record::write_in(&volume.share, &volume.dir, "any", &claim("node-1", true)).await;
    assert!(matches!(written, Err(Error::Denied(_))), "{written:?}");
    let copied = while_copying(&volume.share, &volume.dir, "0", "a clone", async { Ok("copied") }).await;
    assert_eq!(copied.unwrap(), "copied");
    assert_eq!(volume.notes(), 0);
}

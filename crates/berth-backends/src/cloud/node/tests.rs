//! A node with real disks: loop devices, with links as udev would make them.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileExt as _, symlink},
    path::PathBuf,
};

use berth_core::{AccessMode, VolumeCapability};
use tempfile::TempDir;

use super::*;
use crate::cloud::Identity;

const MIB: u64 = 1 << 20;

struct Anything;

impl Disks for Anything {
    fn wanted(&self, volume: &NodeVolume) -> Result<DiskNames> {
        let name = volume.publish_context.get("name").ok_or_else(|| Error::invalid("there is no name"))?;
        Ok(DiskNames {
            links: vec![format!("scsi-0DO_Volume_{name}")],
            ending: name.clone(),
            boundary: vec!['_'],
            identity: Identity::Serial(name.clone()),
        })
    }

    fn may_format(&self, volume: &NodeVolume) -> bool {
        !volume.context.contains_key("noformat")
    }
}

/// A disk, and a node that it is attached to.
struct Bench {
    dir: TempDir,
    node: Arc<DiskNode<Anything>>,
    device: LoopDevice,
    ctx: Context,
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = mount::unmount(&self.staging());
        for number in read_only_over(self.device.path()).unwrap() {
            let _ = loopdev::detach(number);
        }
    }
}

impl Bench {
    fn new(size: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk");
        fs::File::create(&image).unwrap().set_len(size).unwrap();
        // It goes with its last user.
        let options = loopdev::Options { read_only: false, direct_io: false, autoclear: true };
        let device = LoopDevice::attach(&image, options).unwrap();
        fs::create_dir(dir.path().join("by-id")).unwrap();
        symlink(device.path(), dir.path().join("by-id/scsi-0DO_Volume_data")).unwrap();
        let node = Self::open(dir.path());
        Self { dir, node, device, ctx: Context::default() }
    }

    fn open(dir: &Path) -> Arc<DiskNode<Anything>> {
        let finder = Finder { links: dir.join("by-id"), blocks: dir.join("block"), must_run: false };
        DiskNode::open(Anything, finder, &dir.join("records")).unwrap()
    }

    fn staging(&self) -> PathBuf {
        self.dir.path().join("staging")
    }

    async fn stage(&self, volume: &NodeVolume) -> Result<()> {
        self.node.stage(&self.ctx, volume, &self.staging()).await
    }

    async fn unstage(&self, volume: &NodeVolume) {
        self.node.unstage(&self.ctx, &volume.id, &self.staging()).await.unwrap();
    }

    fn grow(&self, size: u64) {
        fs::File::options().write(true).open(self.dir.path().join("disk")).unwrap().set_len(size).unwrap();
        loopdev::refresh_capacity(self.device.number()).unwrap();
    }
}

fn volume(access: Access) -> NodeVolume {
    NodeVolume {
        id: "v-1".parse().unwrap(),
        capability: VolumeCapability { access, mode: AccessMode::SingleNodeWriter },
        read_only: false,
        context: BTreeMap::new(),
        publish_context: [("name".to_owned(), "data".to_owned())].into(),
        staging: None,
    }
}

fn filesystem(fs_type: &str) -> NodeVolume {
    volume(Access::Mount { fs_type: fs_type.to_owned(), flags: vec![], group: None })
}

#[tokio::test]
async fn a_blank_disk_is_formatted_once_and_keeps_its_files_while_it_grows() {
    for (fs_type, size) in [("", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 320 * MIB)] {
        let (bench, volume) = (Bench::new(size), filesystem(fs_type));
        bench.stage(&volume).await.unwrap();
        bench.stage(&volume).await.unwrap();
        fs::write(bench.staging().join("file"), "kept").unwrap();
        bench.unstage(&volume).await;
        bench.unstage(&volume).await;
        assert!(!mount::is_mount_point(&bench.staging()).unwrap());

        bench.stage(&volume).await.unwrap();
        assert_eq!(fs::read_to_string(bench.staging().join("file")).unwrap(), "kept");
        let before = bench.node.usage(&bench.ctx, &volume.id, &bench.staging()).await.unwrap().bytes.total;
        bench.grow(2 * size);
        let range = CapacityRange::new((2 * size).cast_signed(), 0).unwrap();
        let grown = bench.node.expand_on_node(&bench.ctx, &volume.id, &bench.staging(), range).await;
        // Without CAP_SYS_RESOURCE the kernel grows no ext4 that is mounted, and the driver says so.
        let may_grow = !(fs_type.is_empty() && matches!(grown, Err(Error::Precondition(_))));
        if may_grow {
            assert_eq!(grown.unwrap(), NodeExpanded::Done(Capacity::new(2 * size)));
        }
        let after = bench.node.usage(&bench.ctx, &volume.id, &bench.staging()).await.unwrap().bytes.total;
        assert_eq!(after > before + size / 2, may_grow, "{fs_type:?}: {before} {after}");
        bench.unstage(&volume).await;

        // Another filesystem than there is.
        let other = filesystem(if fs_type == "xfs" { "ext4" } else { "xfs" });
        assert!(matches!(bench.stage(&other).await, Err(Error::Invalid(_))));
        // A disk that grew while it was away is grown when it is staged.
        bench.grow(3 * size);
        bench.stage(&volume).await.unwrap();
        let last = bench.node.usage(&bench.ctx, &volume.id, &bench.staging()).await.unwrap().bytes.total;
        assert_eq!(last > after + size / 2, may_grow, "{fs_type:?}: {after} {last}");
        bench.unstage(&volume).await;
    }
}

#[tokio::test]
async fn what_is_not_provably_blank_is_never_formatted() {
    let (bench, volume) = (Bench::new(64 * MIB), filesystem("ext4"));
    let mut no_format = volume.clone();
    no_format.context.insert("noformat".to_owned(), String::new());
    assert!(matches!(bench.stage(&no_format).await, Err(Error::Precondition(_))));
    let read_only = NodeVolume { read_only: true, ..volume.clone() };
    assert!(matches!(bench.stage(&read_only).await, Err(Error::Precondition(_))));
    // One byte of somebody's, far from any signature.
    fs::File::options().write(true).open(bench.device.path()).unwrap().write_all_at(b"x", 40 * MIB).unwrap();
    let error = bench.stage(&volume).await.unwrap_err();
    assert!(matches!(&error, Error::Precondition(said) if said.contains("not formatted")), "{error}");
    // And a device that never appears.
    fs::remove_file(bench.dir.path().join("by-id/scsi-0DO_Volume_data")).unwrap();
    let short = Context::new(
        Some(std::time::Instant::now() + Duration::from_millis(200)),
        crate::Secrets::default(),
        &BTreeMap::new(),
    );
    let error = bench.node.stage(&short, &volume, &bench.staging()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)), "{error}");
}

#[tokio::test]
async fn a_formatting_that_was_cut_off_is_done_again() {
    let (bench, volume) = (Bench::new(64 * MIB), filesystem("ext4"));
    // What a killed mkfs leaves: something, and the note that it was begun.
    fs::File::options().write(true).open(bench.device.path()).unwrap().write_all_at(b"half", MIB).unwrap();
    let record = Record {
        volume: volume.id.to_string(),
        wanted: Anything.wanted(&volume).unwrap(),
        formatting: Some("ext4".to_owned()),
    };
    bench.node.records.write(&key(&volume.id), &record).await.unwrap();
    // Unstaging in between does not forget it.
    bench.unstage(&volume).await;
    let node = Bench::open(bench.dir.path());
    node.stage(&bench.ctx, &volume, &bench.staging()).await.unwrap();
    fs::write(bench.staging().join("file"), "kept").unwrap();
    bench.unstage(&volume).await;
    bench.stage(&volume).await.unwrap();
    assert_eq!(fs::read_to_string(bench.staging().join("file")).unwrap(), "kept");
    bench.unstage(&volume).await;
}

#[tokio::test]
async fn a_raw_disk_is_the_device_itself_and_a_read_only_one_cannot_be_written() {
    let (bench, mut volume) = (Bench::new(8 * MIB), volume(Access::Block));
    bench.stage(&volume).await.unwrap();
    volume.staging = Some(bench.staging());
    let source = bench.node.source(&bench.ctx, &volume).await.unwrap();
    assert_eq!((source.path(), source.kind()), (bench.device.path().to_owned(), AccessKind::Block));
    // The calls that do not say what the disk is.
    volume.publish_context.clear();
    volume.read_only = true;
    let source = bench.node.source(&bench.ctx, &volume).await.unwrap();
    assert_eq!(source.path(), bench.node.source(&bench.ctx, &volume).await.unwrap().path());
    let opened = fs::File::options().write(true).open(source.path());
    // Some kernels refuse to open such a device for writing, others to write to it.
    assert!(opened.and_then(|device| device.write_at(b"x", 0)).is_err(), "it can be written to");
    let usage = bench.node.usage(&bench.ctx, &volume.id, &bench.staging()).await.unwrap();
    assert_eq!(usage.bytes.total, 8 * MIB);
    bench.grow(16 * MIB);
    let range = CapacityRange::new((16 * MIB).cast_signed(), 0).unwrap();
    let grown = bench.node.expand_on_node(&bench.ctx, &volume.id, &bench.staging(), range).await.unwrap();
    assert_eq!(grown, NodeExpanded::Done(Capacity::new(16 * MIB)));
    bench.unstage(&volume).await;
    assert_eq!(read_only_over(bench.device.path()).unwrap(), Vec::<u32>::new());
}

//! Volumes that are images on the share: their size is a wall, one node has them at a time, and nothing of them is lost
//! or left by kills, frozen servers and second nodes.

use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use berth_csi::v1::{self, volume_capability::access_mode::Mode};
use berth_e2e::{Csi, csi, machine};
use tonic::{Code, Status};

use crate::world::{Part, Server};

const MIB: i64 = 1 << 20;
const ONCE: Mode = Mode::SingleNodeWriter;

/// A volume, and how it is to be used.
#[derive(Debug, Clone)]
struct Volume {
    id: String,
    context: BTreeMap<String, String>,
    capability: v1::VolumeCapability,
    capacity: i64,
}

fn capability(fs_type: &str, mode: Mode) -> v1::VolumeCapability {
    let mount = v1::volume_capability::MountVolume { fs_type: fs_type.into(), ..Default::default() };
    v1::VolumeCapability {
        access_type: Some(v1::volume_capability::AccessType::Mount(mount)),
        access_mode: Some(v1::volume_capability::AccessMode { mode: mode.into() }),
    }
}

fn request(server: &Server, name: &str, fs_type: &str, size: i64) -> v1::CreateVolumeRequest {
    let mut parameters: BTreeMap<String, String> =
        server.parameters().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    parameters.insert("kind".to_owned(), "image".to_owned());
    v1::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(v1::CapacityRange { required_bytes: size, limit_bytes: 0 }),
        volume_capabilities: vec![capability(fs_type, ONCE)],
        parameters: parameters.into_iter().collect(),
        ..Default::default()
    }
}

async fn make(csi: &Csi, request: v1::CreateVolumeRequest) -> Result<Volume, Status> {
    let capability = request.volume_capabilities[0].clone();
    let made = csi.controller.clone().create_volume(request).await?.into_inner();
    let volume = made.volume.ok_or_else(|| Status::internal("there is no volume in the answer"))?;
    let context = volume.volume_context.into_iter().collect();
    Ok(Volume { id: volume.volume_id, context, capability, capacity: volume.capacity_bytes })
}

impl Volume {
    fn with_mode(&self, mode: Mode) -> Self {
        Self { capability: capability("", mode), ..self.clone() }
    }

    async fn publish(&self, csi: &Csi, target: &Path) -> Result<(), Status> {
        let request = v1::NodePublishVolumeRequest {
            volume_id: self.id.clone(),
            target_path: target.display().to_string(),
            volume_capability: Some(self.capability.clone()),
            volume_context: self.context.clone().into_iter().collect(),
            ..Default::default()
        };
        csi.node.clone().node_publish_volume(request).await.map(drop)
    }

    /// The size of the filesystem, by the driver's statistics.
    async fn size(&self, csi: &Csi, target: &Path) -> Result<i64> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: self.id.clone(),
            volume_path: target.display().to_string(),
            ..Default::default()
        };
        let usage = csi.node.clone().node_get_volume_stats(request).await?.into_inner().usage;
        let bytes = usage.iter().find(|usage| usage.unit == i32::from(v1::volume_usage::Unit::Bytes));
        Ok(bytes.context("it has a size")?.total)
    }

    async fn grow(&self, csi: &Csi, size: i64) -> Result<v1::ControllerExpandVolumeResponse, Status> {
        let request = v1::ControllerExpandVolumeRequest {
            volume_id: self.id.clone(),
            capacity_range: Some(v1::CapacityRange { required_bytes: size, limit_bytes: 0 }),
            ..Default::default()
        };
        Ok(csi.controller.clone().controller_expand_volume(request).await?.into_inner())
    }

    async fn grow_on_node(&self, csi: &Csi, target: &Path, size: i64) -> Result<i64, Status> {
        let request = v1::NodeExpandVolumeRequest {
            volume_id: self.id.clone(),
            volume_path: target.display().to_string(),
            capacity_range: Some(v1::CapacityRange { required_bytes: size, limit_bytes: 0 }),
            ..Default::default()
        };
        Ok(csi.node.clone().node_expand_volume(request).await?.into_inner().capacity_bytes)
    }
}

fn target(server: &Server, name: &str) -> PathBuf {
    server.dir().join("pods").join(name)
}

fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, word: &str) -> Result<()> {
    let status = answer.err().with_context(|| format!("{word:?} is refused"))?;
    ensure!(status.code() == code && status.message().contains(word), "{status:?}");
    Ok(())
}

/// Writes until there is no room, and tells how much there was.
fn fill(path: &Path) -> Result<i64> {
    let mut file = fs::File::create(path)?;
    let chunk = vec![7; 1 << 20];
    let mut written = 0;
    let full = loop {
        match file.write_all(&chunk).and_then(|()| file.sync_data()) {
            Ok(()) => written += MIB,
            Err(error) => break error,
        }
    };
    ensure!(full.raw_os_error() == Some(rustix::io::Errno::NOSPC.raw_os_error()), "{full}");
    Ok(written)
}

/// What nodes have said about the image of a volume.
fn claims(server: &Server, name: &str) -> Result<usize> {
    let names = fs::read_dir(server.export().join(name))?.map(|entry| Ok(entry?.file_name()));
    let names = names.collect::<Result<Vec<_>>>()?;
    Ok(names.iter().filter(|name| name.to_string_lossy().starts_with(".used-by-")).count())
}

/// Waits until no node uses the image of a volume.
async fn wait_until_released(server: &Server, name: &str, what: &str) -> Result<()> {
    until_used_by(0, server, name, what).await
}

/// Waits until so many nodes use the image of a volume. A loop device that somebody else on this machine looks at just then
/// is let go of a little later.
async fn until_used_by(nodes: usize, server: &Server, name: &str, what: &str) -> Result<()> {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while claims(server, name)? != nodes {
        ensure!(std::time::Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_has_its_size_and_no_more_and_keeps_what_is_written() -> Result<()> {
    for (version, fs_type, size) in [("3", "ext4", 64), ("4.1", "xfs", 300), ("4.1", "btrfs", 128)] {
        let server = Server::start(version)?;
        let controller = server.drive(Part::Controller).await?;
        let node = server.drive(Part::Node).await?;
        let central = Csi::connect(&server.endpoint(Part::Controller))?;
        let csi = Csi::connect(&server.endpoint(Part::Node))?;
        let volume = make(&central, request(&server, "pvc-1", fs_type, size * MIB)).await?;
        ensure!(volume.capacity == size * MIB, "{}", volume.capacity);
        let image = fs::metadata(server.export().join("pvc-1/image"))?;
        ensure!(image.len() == u64::try_from(volume.capacity)?, "{}", image.len());
        ensure!(std::os::unix::fs::MetadataExt::blocks(&image) == 0, "it takes no room");

        let (one, two) = (target(&server, "one"), target(&server, "two"));
        volume.publish(&csi, &one).await?;
        volume.publish(&csi, &two).await?;
        let total = volume.size(&csi, &one).await?;
        ensure!(total > size * MIB / 2 && total <= size * MIB, "{fs_type}: {total}");
        let written = fill(&one.join("large"))?;
        ensure!(written < size * MIB, "{written} bytes fit");
        fs::write(two.join("large"), "small")?;
        csi.unpublish(&volume.id, &one).await?;
        ensure!(fs::read_to_string(two.join("large"))? == "small", "the other target has it still");
        ensure!(claims(&server, "pvc-1")? == 1, "one node uses it");
        csi.unpublish(&volume.id, &two).await?;
        server.nothing_left().await?;
        wait_until_released(&server, "pvc-1", "nobody uses it").await?;
        volume.publish(&csi, &one).await?;
        ensure!(fs::read_to_string(one.join("large"))? == "small", "it is not formatted again");
        csi.unpublish(&volume.id, &one).await?;
        central.delete(&volume.id).await?;
        ensure!(!server.export().join("pvc-1").exists(), "it is gone");
        server.nothing_left().await?;
        node.stop().await?;
        controller.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_grows_while_it_is_used_or_when_it_is_used_next() -> Result<()> {
    let server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    for (fs_type, from, to) in [("xfs", 300, 500), ("ext4", 32, 96)] {
        let volume = make(&csi, request(&server, fs_type, fs_type, from * MIB)).await?;
        let at = target(&server, fs_type);
        volume.publish(&csi, &at).await?;
        fs::write(at.join("file"), "kept")?;
        let before = volume.size(&csi, &at).await?;
        let grown = volume.grow(&csi, to * MIB).await?;
        ensure!(grown.capacity_bytes == to * MIB && grown.node_expansion_required, "{grown:?}");
        match volume.grow_on_node(&csi, &at, to * MIB).await {
            Ok(size) => ensure!(size == to * MIB, "{size}"),
            // Growing a mounted ext4 takes a capability that not every root has.
            Err(status) if fs_type == "ext4" => {
                refused(Err::<(), _>(status), Code::FailedPrecondition, "only while it is not mounted")?;
                csi.unpublish(&volume.id, &at).await?;
                wait_until_released(&server, fs_type, "nobody uses it").await?;
                volume.publish(&csi, &at).await?;
                let image = fs::metadata(server.export().join(fs_type).join("image"))?;
                let room = std::os::unix::fs::MetadataExt::blocks(&image) * 512;
                ensure!(room < image.len() / 4, "the image has its holes: {room} of {} bytes", image.len());
            }
            Err(status) => return Err(status.into()),
        }
        let after = volume.size(&csi, &at).await?;
        ensure!(after > before + (to - from) * MIB / 2, "{fs_type}: {before} and then {after}");
        ensure!(fs::read_to_string(at.join("file"))? == "kept", "what was there is there");
        csi.unpublish(&volume.id, &at).await?;
        csi.delete(&volume.id).await?;
    }
    server.nothing_left().await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_cannot_be_published_is_refused_and_holds_up_nobody() -> Result<()> {
    let server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let volume = make(&csi, request(&server, "pvc-1", "ext4", 32 * MIB)).await?;
    let mut gone = Volume { id: volume.id.replace("pvc-1", "gone"), ..volume.clone() };
    gone.context.insert("subdir".to_owned(), "gone".to_owned());
    let at = target(&server, "one");
    let refusal = tokio::time::timeout(Duration::from_secs(60), gone.publish(&csi, &at)).await;
    refused(refusal.context("it is refused")?, Code::NotFound, "gone")?;
    server.nothing_left().await?;
    // So is one whose target is somebody else's, after the image was brought up for it.
    fs::create_dir_all(&at)?;
    fs::write(at.join("file"), "somebody's")?;
    refused(volume.publish(&csi, &at).await, Code::FailedPrecondition, "not empty")?;
    wait_until_released(&server, "pvc-1", "it is free for another node").await?;
    server.nothing_left().await?;
    fs::remove_file(at.join("file"))?;
    volume.publish(&csi, &at).await?;
    csi.unpublish(&volume.id, &at).await?;
    wait_until_released(&server, "pvc-1", "nobody uses it").await?;
    csi.delete(&volume.id).await?;
    server.nothing_left().await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_does_not_begin_to_write_what_is_being_copied_unless_the_copy_takes_too_long() -> Result<()> {
    let server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let volume = make(&csi, request(&server, "pvc-1", "ext4", 32 * MIB)).await?;
    let at = target(&server, "one");
    let copying = server.export().join("pvc-1/.copied-by-0.json");
    fs::write(&copying, r#"{"doing":"a clone"}"#)?;
    refused(volume.publish(&csi, &at).await, Code::FailedPrecondition, "is being copied for a clone")?;
    wait_until_released(&server, "pvc-1", "who copies sees nobody").await?;
    server.nothing_left().await?;
    fs::remove_file(&copying)?;
    volume.publish(&csi, &at).await?;
    csi.unpublish(&volume.id, &at).await?;
    wait_until_released(&server, "pvc-1", "nobody uses it").await?;

    // Whoever said this has died.
    fs::write(&copying, "")?;
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(301);
    fs::File::options().write(true).open(&copying)?.set_modified(long_ago)?;
    volume.publish(&csi, &at).await?;
    ensure!(!copying.exists(), "it is forgotten");
    csi.unpublish(&volume.id, &at).await?;
    wait_until_released(&server, "pvc-1", "nobody uses it").await?;
    csi.delete(&volume.id).await?;
    server.nothing_left().await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_at_a_time_writes_and_many_read() -> Result<()> {
    let server = Server::start("4.1")?;
    let (node, other) = (server.drive(Part::Node).await?, server.drive(Part::Other).await?);
    let here = Csi::connect(&server.endpoint(Part::Node))?;
    let there = Csi::connect(&server.endpoint(Part::Other))?;
    let volume = make(&here, request(&server, "pvc-1", "ext4", 32 * MIB)).await?;
    let (near, far) = (target(&server, "near"), target(&server, "far"));
    volume.publish(&here, &near).await?;
    fs::write(near.join("file"), "from here")?;
    let read = volume.with_mode(Mode::MultiNodeReaderOnly);
    refused(volume.publish(&there, &far).await, Code::FailedPrecondition, "node-1")?;
    refused(read.publish(&there, &far).await, Code::FailedPrecondition, "node-1")?;
    ensure!(claims(&server, "pvc-1")? == 1, "who is refused says nothing");
    here.unpublish(&volume.id, &near).await?;
    wait_until_released(&server, "pvc-1", "it is free for another node").await?;

    volume.publish(&there, &far).await?;
    ensure!(fs::read_to_string(far.join("file"))? == "from here", "it moves with what is in it");
    there.unpublish(&volume.id, &far).await?;
    wait_until_released(&server, "pvc-1", "it is free for readers").await?;
    read.publish(&there, &far).await?;
    read.publish(&here, &near).await?;
    ensure!(fs::read_to_string(near.join("file"))? == "from here", "both read");
    ensure!(fs::write(near.join("file"), "x").is_err(), "and write nothing");
    here.unpublish(&volume.id, &near).await?;
    until_used_by(1, &server, "pvc-1", "one of the readers is gone").await?;
    refused(volume.publish(&here, &near).await, Code::FailedPrecondition, "for reading on node \"node-2\"")?;
    there.unpublish(&volume.id, &far).await?;
    here.delete(&volume.id).await?;
    server.nothing_left().await?;
    other.stop().await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_and_clones_are_taken_at_rest_and_used_beside_their_source() -> Result<()> {
    let server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let volume = make(&csi, request(&server, "source", "btrfs", 256 * MIB)).await?;
    let at = target(&server, "source");
    volume.publish(&csi, &at).await?;
    fs::write(at.join("file"), "kept")?;
    let like = |name: &str, source| {
        let request = request(&server, name, "btrfs", 512 * MIB);
        v1::CreateVolumeRequest { volume_content_source: Some(source), ..request }
    };
    refused(csi.snapshot("snap", &volume.id).await, Code::FailedPrecondition, "stop the pods")?;
    let clone = like("clone", csi::from_volume(&volume.id));
    refused(make(&csi, clone.clone()).await, Code::FailedPrecondition, "stop the pods")?;
    csi.unpublish(&volume.id, &at).await?;
    wait_until_released(&server, "source", "it is at rest").await?;

    let snapshot = csi.ready_snapshot("snap", &volume.id).await?;
    ensure!(snapshot.size_bytes == 256 * MIB, "{snapshot:?}");
    let archive = fs::metadata(server.export().join("snap/source.tar.gz"))?;
    ensure!(archive.len() < 32 << 20, "holes take no room: {}", archive.len());
    let plain = {
        let mut plain = like("plain", csi::from_snapshot(&snapshot.snapshot_id));
        plain.parameters.remove("kind");
        plain
    };
    refused(make(&csi, plain).await, Code::InvalidArgument, "kind: image")?;
    let copies = [
        make(&csi, clone).await?,
        make(&csi, like("restored", csi::from_snapshot(&snapshot.snapshot_id))).await?,
    ];
    volume.publish(&csi, &at).await?;
    fs::write(at.join("file"), "changed since")?;
    for (number, copy) in copies.iter().enumerate() {
        let at = target(&server, &number.to_string());
        copy.publish(&csi, &at).await?;
        ensure!(fs::read_to_string(at.join("file"))? == "kept", "as it was then");
        ensure!(copy.size(&csi, &at).await? > 300 * MIB, "as large as asked for");
        csi.unpublish(&copy.id, &at).await?;
        csi.delete(&copy.id).await?;
    }
    csi.unpublish(&volume.id, &at).await?;
    csi.delete_snapshot(&snapshot.snapshot_id).await?;
    csi.delete(&volume.id).await?;
    server.nothing_left().await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_driver_keeps_what_pods_have_and_lets_go_of_the_rest() -> Result<()> {
    let server = Server::start("4.1")?;
    let mut node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let (kept, left) = (
        make(&csi, request(&server, "kept", "ext4", 32 * MIB)).await?,
        make(&csi, request(&server, "left", "ext4", 32 * MIB)).await?,
    );
    let (here, gone) = (target(&server, "here"), target(&server, "gone"));
    kept.publish(&csi, &here).await?;
    left.publish(&csi, &gone).await?;
    let file = fs::File::create(here.join("file"))?;
    node.kill()?;
    (&file).write_all(b"written without a driver")?;
    file.sync_all()?;
    // As of a driver that was killed between the two.
    machine::run("umount", &[&gone.display().to_string()])?;
    node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    wait_until_released(&server, "left", "what nobody has is let go of").await?;
    ensure!(claims(&server, "kept")? == 1, "what a pod has is kept");
    kept.publish(&csi, &here).await?;
    ensure!(fs::read_to_string(here.join("file"))? == "written without a driver", "all of it");
    drop(file);
    csi.unpublish(&kept.id, &here).await?;
    csi.unpublish(&left.id, &gone).await?;
    wait_until_released(&server, "kept", "now it is not").await?;
    csi.delete(&kept.id).await?;
    csi.delete(&left.id).await?;
    server.nothing_left().await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_whose_target_somebody_else_unmounted_is_released_by_its_unpublish() -> Result<()> {
    let server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let (kept, left) = (
        make(&csi, request(&server, "kept", "ext4", 32 * MIB)).await?,
        make(&csi, request(&server, "left", "ext4", 32 * MIB)).await?,
    );
    let (here, gone) = (target(&server, "here"), target(&server, "gone"));
    kept.publish(&csi, &here).await?;
    left.publish(&csi, &gone).await?;
    machine::run("umount", &[&gone.display().to_string()])?;
    csi.unpublish(&left.id, &gone).await?;
    wait_until_released(&server, "left", "another node may have it").await?;
    ensure!(claims(&server, "kept")? == 1, "what a pod has is kept");
    csi.unpublish(&kept.id, &here).await?;
    csi.delete(&kept.id).await?;
    csi.delete(&left.id).await?;
    server.nothing_left().await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_server_holds_no_call_and_gets_all_that_was_written() -> Result<()> {
    let mut server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let volume = make(&csi, request(&server, "pvc-1", "ext4", 32 * MIB)).await?;
    let at = target(&server, "pod");
    volume.publish(&csi, &at).await?;
    fs::write(at.join("synced"), "synced")?;
    machine::run("sync", &["-f", &at.display().to_string()])?;
    server.control("stop")?;
    fs::write(at.join("cached"), "not yet at the server")?;
    let limit = Duration::from_secs(50);
    tokio::time::timeout(limit, volume.size(&csi, &at)).await.context("statistics hang")??;
    tokio::time::timeout(limit, csi.unpublish(&volume.id, &at)).await.context("unpublishing hangs")??;
    ensure!(!at.exists(), "the pod's directory is free");
    ensure!(claims(&server, "pvc-1")? == 1, "the image is not free before all is written");
    server.control("cont")?;
    server.nothing_left().await?;
    wait_until_released(&server, "pvc-1", "it is let go of when the server is back").await?;
    volume.publish(&csi, &at).await?;
    ensure!(fs::read_to_string(at.join("cached"))? == "not yet at the server", "nothing is lost");
    csi.unpublish(&volume.id, &at).await?;
    csi.delete(&volume.id).await?;
    server.nothing_left().await?;
    node.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_image_cannot_be_is_refused_and_makes_nothing() -> Result<()> {
    let server = Server::start("4.1")?;
    let node = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let change = |change: &dyn Fn(&mut v1::CreateVolumeRequest)| {
        let mut request = request(&server, "pvc-1", "", 32 * MIB);
        change(&mut request);
        request
    };
    let used = |request: &mut v1::CreateVolumeRequest, fs_type: &str, mode| {
        request.volume_capabilities = vec![capability(fs_type, mode)];
    };
    let limit = |request: &mut v1::CreateVolumeRequest, fs_type: &str, bytes| {
        request.volume_capabilities = vec![capability(fs_type, ONCE)];
        request.capacity_range = Some(v1::CapacityRange { required_bytes: 1, limit_bytes: bytes });
    };
    for (request, code, word) in [
        (
            change(&|request| drop(request.parameters.insert("kind".into(), "loop".into()))),
            Code::InvalidArgument,
            "none of directory, image",
        ),
        (
            change(&|request| used(request, "", Mode::MultiNodeMultiWriter)),
            Code::InvalidArgument,
            "one node at a time",
        ),
        (
            change(&|request| used(request, "", Mode::MultiNodeSingleWriter)),
            Code::InvalidArgument,
            "one node at a time",
        ),
        (change(&|request| used(request, "ntfs", ONCE)), Code::InvalidArgument, "ntfs"),
        (change(&|request| limit(request, "xfs", 100 * MIB)), Code::OutOfRange, "limit_bytes"),
        (change(&|request| limit(request, "ext4", MIB)), Code::OutOfRange, "limit_bytes"),
        (
            change(&|request| {
                let raw = v1::volume_capability::AccessType::Block(v1::volume_capability::BlockVolume {});
                request.volume_capabilities[0].access_type = Some(raw);
            }),
            Code::InvalidArgument,
            "block access",
        ),
    ] {
        refused(make(&csi, request).await, code, word)?;
    }
    let left = fs::read_dir(server.export())?
        .filter(|entry| entry.as_ref().is_ok_and(|entry| entry.file_name() != ".berth"));
    ensure!(left.count() == 0, "nothing is made");

    // A volume that is there is no more to be used by many than a new one.
    let volume = make(&csi, request(&server, "pvc-1", "", 32 * MIB)).await?;
    let many = volume.with_mode(Mode::MultiNodeMultiWriter);
    refused(many.publish(&csi, &target(&server, "x")).await, Code::InvalidArgument, "one node at a time")?;
    let validate = v1::ValidateVolumeCapabilitiesRequest {
        volume_id: volume.id.clone(),
        volume_capabilities: vec![many.capability.clone()],
        ..Default::default()
    };
    let answer = csi.controller.clone().validate_volume_capabilities(validate).await?.into_inner();
    ensure!(answer.confirmed.is_none() && answer.message.contains("one node"), "{answer:?}");
    // What is on it and not known is left alone.
    fs::write(server.export().join("pvc-1/image"), vec![7; 1 << 20])?;
    refused(volume.publish(&csi, &target(&server, "x")).await, Code::FailedPrecondition, "not formatted")?;
    ensure!(fs::read(server.export().join("pvc-1/image"))? == vec![7; 1 << 20], "as it was");
    fs::remove_file(server.export().join("pvc-1/image"))?;
    std::os::unix::fs::symlink("/etc/passwd", server.export().join("pvc-1/image"))?;
    refused(volume.publish(&csi, &target(&server, "x")).await, Code::FailedPrecondition, "gone")?;
    csi.delete(&volume.id).await?;
    server.nothing_left().await?;
    node.stop().await
}

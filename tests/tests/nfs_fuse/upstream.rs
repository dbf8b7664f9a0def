//! What csi-driver-nfs made, in every form it has had, is Berth's from the first call on; and what Berth makes is where
//! csi-driver-nfs looks for it, and as it reads it.

use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt as _, path::Path};

use anyhow::{Context as _, Result, ensure};
use berth_csi::v1;
use berth_e2e::{
    Csi,
    csi::{from_snapshot, from_volume},
    machine,
};

use crate::{
    calls::capability,
    world::{Part, Server},
};

/// What becomes of a volume's directory when the volume is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Gone,
    Kept,
    Archived(&'static str),
}

/// Ids as csi-driver-nfs writes and has written them (`SERVER` and `SHARE` stand for themselves), the directory, what a
/// snapshot's archive of it is called, and what its id says about deletion.
const VOLUMES: [(&str, &str, &str, After); 11] = [
    ("SERVER#SHARE#pvc-1##", "pvc-1", "pvc-1", After::Gone),
    ("SERVER#SHARE#pvc-2", "pvc-2", "pvc-2", After::Gone),
    ("SERVER#SHARE#dir#pvc-3", "dir", "pvc-3", After::Gone),
    ("SERVER#SHARE#team/app#pvc-4#", "team/app", "pvc-4", After::Gone),
    ("SERVER#SHARE#pvc-5##delete", "pvc-5", "pvc-5", After::Gone),
    ("SERVER#SHARE#pvc-6##retain", "pvc-6", "pvc-6", After::Kept),
    ("SERVER#SHARE#team/kept#pvc-7#Retain", "team/kept", "pvc-7", After::Kept),
    ("SERVER#SHARE#pvc-8##archive", "pvc-8", "pvc-8", After::Archived("archived-pvc-8")),
    ("SERVER#SHARE#team/old#pvc-9#Archive", "team/old", "pvc-9", After::Archived("archived-team/old")),
    ("SERVER/SHARE/pvc-10", "pvc-10", "pvc-10", After::Gone),
    ("SERVER#SHARE#a b/c.d#pvc-11#", "a b/c.d", "pvc-11", After::Gone),
];

/// Archives as csi-driver-nfs makes them: by `tar -C <volume> -czvf <archive> .`, by the same without compression, and
/// by its own code, whose names have no `./` before them.
const ARCHIVES: [(&str, &str, &[&str]); 4] = [
    ("snap-1", "tar.gz", &["-czvf"]),
    ("snap-2", "tar", &["-cvf"]),
    ("snap-3", "tar.gz", &["--transform=s,^\\./,,", "-czvf"]),
    ("snap-4", "tar", &["--format=ustar", "--exclude=long*", "-cvf"]),
];

/// A server with a driver beside it, and what a cluster says about its volumes.
struct World {
    server: Server,
    csi: Csi,
    share: String,
}

impl World {
    fn id(&self, pattern: &str) -> String {
        pattern.replace("SERVER", "127.0.0.1").replace("SHARE", self.share.trim_matches('/'))
    }

    /// A PersistentVolume's attributes, as csi-driver-nfs and Kubernetes write them.
    fn attributes(&self, dir: &str) -> BTreeMap<String, String> {
        let pairs = [
            ("server", "127.0.0.1"),
            ("share", self.share.as_str()),
            ("subDir", dir),
            ("mountPermissions", "0"),
            ("csi.storage.k8s.io/pv/name", "pvc-1"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("storage.kubernetes.io/csiProvisionerIdentity", "1690000000000-8081-nfs.csi.k8s.io"),
        ];
        pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
    }

    fn class(&self) -> BTreeMap<String, String> {
        self.server.parameters().into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    async fn create(&self, name: &str, source: v1::VolumeContentSource) -> Result<String> {
        let request = v1::CreateVolumeRequest {
            name: name.to_owned(),
            volume_capabilities: vec![capability()],
            parameters: self.class(),
            volume_content_source: Some(source),
            ..Default::default()
        };
        let made = self.csi.controller.clone().create_volume(request).await?.into_inner();
        Ok(made.volume.context("a volume is made")?.volume_id)
    }
}

/// One of everything that a volume has.
fn fill(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir.join("sub/empty"))?;
    fs::write(dir.join("sub/file"), vec![7; 300_000])?;
    fs::write(dir.join("setuid"), "program")?;
    std::os::unix::fs::chown(dir.join("setuid"), Some(1000), Some(2000))?;
    fs::set_permissions(dir.join("setuid"), fs::Permissions::from_mode(0o4755))?;
    fs::hard_link(dir.join("sub/file"), dir.join("again"))?;
    fs::write(dir.join(format!("long{}", "g".repeat(150))), "name")?;
    std::os::unix::fs::symlink("../../etc/passwd", dir.join("sub/link"))?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o1777))?;
    Ok(())
}

/// Whether two directories have the same in them: names, modes, owners, links and content.
fn same(one: &Path, other: &Path) -> Result<()> {
    let look = |dir: &Path| {
        let dir = dir.display().to_string();
        // How many names a directory has is the filesystem's own affair, filling it changes its time, and not every
        // server has times for links.
        let others = ["(", "-type", "d", "-o", "-type", "l", ")", "-printf", "%P %y %m %U %G %l\\n"];
        let files = ["-o", "-printf", "%P %y %m %U %G %n %T+\\n"];
        let args = [&[dir.as_str(), "-mindepth", "1"][..], &others, &files].concat();
        let out = machine::run("find", &args)?;
        // Archives may have whole seconds.
        let whole = |line: &str| line.rsplit_once('.').map_or(line, |(before, _)| before).to_owned();
        let mut lines: Vec<String> = out.lines().map(whole).collect();
        lines.sort();
        Ok::<_, anyhow::Error>(lines)
    };
    let (left, right) = (look(one)?, look(other)?);
    ensure!(left == right, "{}: {left:#?}\n{}: {right:#?}", one.display(), other.display());
    let (one, other) = (one.display().to_string(), other.display().to_string());
    machine::run("diff", &["-r", "--no-dereference", &one, &other]).map(drop)
}

async fn world() -> Result<(World, berth_e2e::program::Program)> {
    let server = Server::start("4.1")?;
    let driver = server.drive(Part::Node).await?;
    let csi = Csi::connect(&server.endpoint(Part::Node))?;
    let share = server.parameters()[1].1.clone();
    Ok((World { server, csi, share }, driver))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_adopted_used_copied_and_deleted_whatever_the_form_of_its_id() -> Result<()> {
    let (world, driver) = world().await?;
    let export = world.server.export();
    for (number, (pattern, dir, archive, after)) in VOLUMES.into_iter().enumerate() {
        let id = world.id(pattern);
        fs::create_dir_all(export.join(dir))?;
        fill(&export.join(dir))?;
        let checked: Result<()> = async {
            adopt(&world, &id, dir).await?;
            publish(&world, &id, dir).await?;
            copy(&world, &id, dir, number).await?;
            pack(&world, &id, dir, archive, number).await?;
            delete(&world, &id, dir, after).await
        }
        .await;
        checked.with_context(|| id.clone())?;
    }
    let left: Vec<String> =
        machine::listing(&export)?.into_iter().filter(|line| !line.starts_with(".berth/")).collect();
    ensure!(
        left.iter().all(|line| ["archived-", "pvc-6", "team/"].iter().any(|name| line.starts_with(name))),
        "{left:?}"
    );
    world.server.nothing_left().await?;
    driver.stop().await
}

/// It is there, as its PersistentVolume says, and grows.
async fn adopt(world: &World, id: &str, dir: &str) -> Result<()> {
    let mut controller = world.csi.controller.clone();
    let asked = v1::ControllerGetVolumeRequest { volume_id: id.to_owned() };
    let volume = controller.controller_get_volume(asked).await?.into_inner().volume.context("it is there")?;
    ensure!(volume.volume_id == id && volume.volume_context["subdir"] == dir, "{volume:?}");
    let validate = |context: BTreeMap<String, String>| v1::ValidateVolumeCapabilitiesRequest {
        volume_id: id.to_owned(),
        volume_context: context,
        volume_capabilities: vec![capability()],
        ..Default::default()
    };
    let answer = controller.validate_volume_capabilities(validate(world.attributes(dir))).await?.into_inner();
    ensure!(answer.confirmed.is_some(), "{}", answer.message);
    let answer =
        controller.validate_volume_capabilities(validate(world.attributes("else"))).await?.into_inner();
    ensure!(answer.confirmed.is_none() && answer.message.contains("subDir"), "{answer:?}");
    let grow = v1::ControllerExpandVolumeRequest {
        volume_id: id.to_owned(),
        capacity_range: Some(v1::CapacityRange { required_bytes: 5 << 30, limit_bytes: 0 }),
        ..Default::default()
    };
    let grown = controller.controller_expand_volume(grow).await?.into_inner();
    ensure!((grown.capacity_bytes, grown.node_expansion_required) == (5 << 30, false), "{grown:?}");
    Ok(())
}

async fn publish(world: &World, id: &str, dir: &str) -> Result<()> {
    let target = world.server.dir().join("pods/target");
    let publish = v1::NodePublishVolumeRequest {
        volume_id: id.to_owned(),
        target_path: target.display().to_string(),
        volume_capability: Some(capability()),
        volume_context: world.attributes(dir),
        ..Default::default()
    };
    world.csi.node.clone().node_publish_volume(publish).await?;
    fs::write(target.join("written"), "by a pod")?;
    ensure!(
        fs::read_to_string(world.server.export().join(dir).join("written"))? == "by a pod",
        "it is there"
    );
    let unpublish = v1::NodeUnpublishVolumeRequest {
        volume_id: id.to_owned(),
        target_path: target.display().to_string(),
    };
    world.csi.node.clone().node_unpublish_volume(unpublish).await?;
    Ok(())
}

async fn copy(world: &World, id: &str, dir: &str, number: usize) -> Result<()> {
    let name = format!("clone-{number}");
    let clone = world.create(&name, from_volume(id)).await?;
    same(&world.server.export().join(dir), &world.server.export().join(&name))?;
    world.csi.delete(&clone).await?;
    Ok(())
}

/// A snapshot lies where csi-driver-nfs looks for it, and is unpacked as it does that.
async fn pack(world: &World, id: &str, dir: &str, archive: &str, number: usize) -> Result<()> {
    let name = format!("snapshot-{number}");
    let taken = world.csi.ready_snapshot(&name, id).await?;
    ensure!(taken.source_volume_id == id, "{taken:?}");
    ensure!(taken.snapshot_id == world.id(&format!("SERVER#SHARE#{name}#{name}#{archive}")), "{taken:?}");
    let (packed, unpacked) = (
        world.server.export().join(&name).join(format!("{archive}.tar.gz")),
        world.server.dir().join("unpacked"),
    );
    fs::create_dir(&unpacked)?;
    let (packed, to) = (packed.display().to_string(), unpacked.display().to_string());
    machine::run("tar", &["-xzvf", &packed, "-C", &to])?;
    same(&world.server.export().join(dir), &unpacked)?;
    fs::remove_dir_all(&unpacked)?;
    let delete = v1::DeleteSnapshotRequest { snapshot_id: taken.snapshot_id, ..Default::default() };
    world.csi.controller.clone().delete_snapshot(delete).await?;
    ensure!(!world.server.export().join(&name).exists(), "the snapshot is gone with its directory");
    Ok(())
}

async fn delete(world: &World, id: &str, dir: &str, after: After) -> Result<()> {
    let export = world.server.export();
    for _ in 0..2 {
        world.csi.delete(id).await?;
        let kept = match after {
            After::Gone => None,
            After::Kept => Some(dir),
            After::Archived(name) => Some(name),
        };
        ensure!(export.join(dir).exists() == (after == After::Kept), "{after:?}");
        if let Some(name) = kept {
            ensure!(fs::read_to_string(export.join(name).join("setuid"))? == "program", "{name} is whole");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_adopted_restored_and_deleted_whoever_packed_it() -> Result<()> {
    let (world, driver) = world().await?;
    let export = world.server.export();
    let source = world.server.dir().join("source");
    fs::create_dir(&source)?;
    fill(&source)?;
    for (name, ending, how) in ARCHIVES {
        let id = world.id(&format!("SERVER#SHARE#{name}#{name}#pvc-gone"));
        fs::create_dir(export.join(name))?;
        let archive = export.join(name).join(format!("pvc-gone.{ending}"));
        let (from, to) = (source.display().to_string(), archive.display().to_string());
        let args: Vec<&str> =
            ["-C", &from].into_iter().chain(how.iter().copied()).chain([to.as_str(), "."]).collect();
        machine::run("tar", &args)?;

        let asked = v1::GetSnapshotRequest { snapshot_id: id.clone(), ..Default::default() };
        let found = world.csi.controller.clone().get_snapshot(asked).await?.into_inner().snapshot;
        let found = found.context("it is there")?;
        let size = i64::try_from(fs::metadata(&archive)?.len())?;
        ensure!(found.ready_to_use && found.size_bytes == size, "{found:?}");
        ensure!(found.source_volume_id == world.id("SERVER#SHARE#pvc-gone##"), "{found:?}");
        let listed = v1::ListSnapshotsRequest { snapshot_id: id.clone(), ..Default::default() };
        let listed = world.csi.controller.clone().list_snapshots(listed).await?.into_inner();
        ensure!(listed.entries.len() == 1, "{listed:?}");

        let volume = world.create(&format!("restored-{name}"), from_snapshot(&id)).await?;
        let restored = export.join(format!("restored-{name}"));
        let expected = if name == "snap-4" { without_long_names(&source)? } else { source.clone() };
        same(&expected, &restored).with_context(|| name.to_owned())?;
        ensure!(fs::metadata(&restored)?.permissions().mode() & 0o7777 == 0o1777, "as the directory was");

        let delete = v1::DeleteSnapshotRequest { snapshot_id: id, ..Default::default() };
        world.csi.controller.clone().delete_snapshot(delete).await?;
        ensure!(!export.join(name).exists(), "nothing is left of {name}");
        world.csi.delete(&volume).await?;
    }
    driver.stop().await
}

/// A copy with what fits the oldest format of archives.
fn without_long_names(source: &Path) -> Result<std::path::PathBuf> {
    let copy = source.with_file_name("short");
    machine::run("cp", &["-a", &source.display().to_string(), &copy.display().to_string()])?;
    fs::remove_file(copy.join(format!("long{}", "g".repeat(150))))?;
    Ok(copy)
}

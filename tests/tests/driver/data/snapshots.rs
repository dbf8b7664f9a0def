//! Snapshots and clones hold the bytes of their moment, whatever happens to the source.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use berth_e2e::{
    DiskType, Expected, Shape, Testbed, content,
    csi::{from_snapshot, from_volume},
    machine::run,
};

use crate::data::{DIR, MATRIX};

const LENGTH: usize = 3 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_keeps_the_old_bytes_and_a_clone_has_the_new() -> Result<()> {
    for (disk, shapes) in MATRIX {
        let bed = Testbed::start(*disk, &[]).await?;
        for shape in *shapes {
            snapshot_and_clone(&bed, *shape)
                .await
                .with_context(|| format!("{shape:?} on {}", disk.as_str()))?;
        }
        bed.finish().await?;
    }
    Ok(())
}

async fn snapshot_and_clone(bed: &Testbed, shape: Shape) -> Result<()> {
    let source = bed.csi.create("source", shape).await?;
    let mounted = bed.mount(&source).await?;
    content::write(&mounted.target.join("kept"), &content::bytes(1, LENGTH))?;
    content::write(&mounted.target.join("changed"), &content::bytes(2, LENGTH))?;

    let snapshot = bed.csi.snapshot("before", &source.id).await?;
    ensure!(snapshot.ready_to_use, "the snapshot is not ready");
    ensure!(snapshot.size_bytes >= shape.bytes, "a snapshot of {} bytes", snapshot.size_bytes);
    content::write(&mounted.target.join("changed"), &content::bytes(3, LENGTH))?;
    content::write(&mounted.target.join("added"), &content::bytes(4, LENGTH))?;

    let clone = bed.csi.create_from("clone", shape, from_volume(&source.id)).await?;
    let restored = bed.csi.create_from("restored", shape, from_snapshot(&snapshot.snapshot_id)).await?;
    let larger = Shape { bytes: shape.bytes * 2, ..shape };
    let grown = bed.csi.create_from("grown", larger, from_snapshot(&snapshot.snapshot_id)).await?;

    // All four are in use at once, with the same filesystem UUIDs inside unless the driver takes care.
    let in_clone = bed.mount(&clone).await?;
    let in_restored = bed.mount(&restored).await?;
    let in_grown = bed.mount(&grown).await?;
    check_old(&in_restored.target).context("restored")?;
    check_old(&in_grown.target).context("restored to a larger volume")?;
    check_new(&in_clone.target).context("clone")?;
    check_new(&mounted.target).context("source")?;

    // A copy is a volume of its own.
    content::write(&in_clone.target.join("kept"), &content::bytes(5, LENGTH))?;
    content::write(&in_restored.target.join("kept"), &content::bytes(6, LENGTH))?;
    check_new(&mounted.target).context("source after its copies were written to")?;
    if larger.kind != berth_e2e::Kind::Dir {
        let total = crate::data::bytes_used(bed, &in_grown).await?.total;
        ensure!(total > shape.bytes, "restored to {} bytes it has room for {total}", larger.bytes);
    }

    // The snapshot outlives its source.
    bed.csi.unmount(&mounted).await?;
    bed.csi.delete(&source.id).await?;
    let late = bed.csi.create_from("late", shape, from_snapshot(&snapshot.snapshot_id)).await?;
    bed.csi.delete_snapshot(&snapshot.snapshot_id).await?;
    let in_late = bed.mount(&late).await?;
    check_old(&in_late.target).context("restored after the source was deleted")?;

    for (volume, mounted) in [(clone, in_clone), (restored, in_restored), (grown, in_grown), (late, in_late)]
    {
        bed.csi.unmount(&mounted).await?;
        bed.csi.delete(&volume.id).await?;
    }
    bed.check_leftovers(&Expected::default()).await
}

fn check_old(dir: &Path) -> Result<()> {
    content::check(&dir.join("kept"), 1, LENGTH)?;
    content::check(&dir.join("changed"), 2, LENGTH)?;
    ensure!(!dir.join("added").exists(), "it has a file that was added later");
    Ok(())
}

fn check_new(dir: &Path) -> Result<()> {
    content::check(&dir.join("kept"), 1, LENGTH)?;
    content::check(&dir.join("changed"), 3, LENGTH)?;
    content::check(&dir.join("added"), 4, LENGTH)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_snapshot_keeps_links_attributes_lists_and_holes() -> Result<()> {
    for disk in [DiskType::Ext4, DiskType::Xfs] {
        let bed = Testbed::start(disk, &[]).await?;
        let source = bed.csi.create("source", DIR).await?;
        let mounted = bed.mount(&source).await?;
        make_curious_tree(&mounted.target)?;
        let before = describe(&mounted.target)?;
        let snapshot = bed.csi.snapshot("snapshot", &source.id).await?;
        bed.csi.unmount(&mounted).await?;
        bed.csi.delete(&source.id).await?;

        let restored = bed.csi.create_from("restored", DIR, from_snapshot(&snapshot.snapshot_id)).await?;
        let mounted = bed.mount(&restored).await?;
        assert_eq!(describe(&mounted.target)?, before, "on {}", disk.as_str());
        let (one, two) = (mounted.target.join("linked"), mounted.target.join("deep/er/link"));
        assert_eq!(fs::metadata(one)?.ino(), fs::metadata(two)?.ino(), "one file became two");
        bed.csi.unmount(&mounted).await?;
        bed.csi.delete_snapshot(&snapshot.snapshot_id).await?;
        crate::data::finish(bed, &[&restored]).await?;
    }
    Ok(())
}

fn make_curious_tree(dir: &Path) -> Result<()> {
    let path = |name: &str| dir.join(name).display().to_string();
    fs::create_dir_all(dir.join("deep/er"))?;
    content::write(&dir.join("linked"), &content::bytes(1, 5000))?;
    fs::hard_link(dir.join("linked"), dir.join("deep/er/link"))?;
    std::os::unix::fs::symlink("/etc/passwd", dir.join("absolute"))?;
    std::os::unix::fs::symlink("../linked", dir.join("deep/dangling"))?;
    content::write(&dir.join("attributes"), b"x")?;
    run("setfattr", &["-n", "user.colour", "-v", "blue", &path("attributes")])?;
    run("setfattr", &["-n", "trusted.note", "-v", "root's", &path("attributes")])?;
    run("setfacl", &["-m", "u:1234:rw,g:4321:r", &path("attributes")])?;
    run("setfacl", &["-d", "-m", "u:1234:rwx", &path("deep")])?;
    let holes = fs::File::create(dir.join("holes"))?;
    holes.set_len(64 << 20)?;
    holes.write_all_at(&content::bytes(2, 4096), 32 << 20)?;
    holes.sync_all()?;
    run("mkfifo", &["-m", "0640", &path("fifo")])?;
    run("mknod", &["-m", "0600", &path("null"), "c", "1", "3"])?;
    std::os::unix::fs::chown(dir.join("deep"), Some(1000), Some(2000))?;
    fs::set_permissions(dir.join("deep"), fs::Permissions::from_mode(0o3771))?;
    fs::set_permissions(dir.join("linked"), fs::Permissions::from_mode(0o4755))?;
    run("touch", &["-d", "2001-02-03 04:05:06.789012345", &path("linked")])?;
    Ok(())
}

/// Everything about a tree that a copy must keep, found out with the system's own tools.
fn describe(dir: &Path) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let root = dir.display().to_string();
    let list = run("find", &[&root, "-mindepth", "1", "-printf", "%P\t%y %m %U:%G %s %T@ %n %l\n"])?;
    for (name, facts) in list.lines().filter_map(|line| line.split_once('\t')) {
        let path = dir.join(name);
        let meta = fs::symlink_metadata(&path)?;
        // A directory's own size is the filesystem's business.
        let words = facts.split(' ').enumerate().filter(|(column, _)| !meta.is_dir() || *column != 3);
        let mut facts = words.map(|(_, word)| word).collect::<Vec<_>>().join(" ");
        if !meta.is_symlink() {
            let path = path.display().to_string();
            facts += &run("getfacl", &["-n", "-c", "-p", &path])?;
            let attributes = run("getfattr", &["-d", "-m", "user|trusted", "--absolute-names", &path])?;
            facts.extend(attributes.lines().skip(1));
        }
        if meta.is_file() {
            let sparse = meta.blocks() * 512 < meta.len() / 2;
            facts += if sparse { " sparse " } else { " dense " };
            facts += &run("sha256sum", &["--zero", "--", &path.display().to_string()])?[..64];
        }
        found.insert(name.to_owned(), facts);
    }
    ensure!(found.len() == 10, "the tree has other entries than were made: {:?}", found.keys());
    Ok(found)
}

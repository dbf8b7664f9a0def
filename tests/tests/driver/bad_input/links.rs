//! Symlinks that a workload plants in its volume, for the driver to stumble over as root.

use std::{fs, os::unix::fs::symlink, path::Path};

use anyhow::{Context, Result, ensure};
use berth_e2e::{
    DiskType, Shape, Testbed,
    csi::{from_snapshot, from_volume},
    machine::run,
};

use crate::bad_input::{BTRFS, DIR, IMAGE};

#[tokio::test(flavor = "multi_thread")]
async fn planted_symlinks_are_never_followed() -> Result<()> {
    for (disk, shape) in
        [(DiskType::Btrfs, BTRFS), (DiskType::Ext4, DIR), (DiskType::Xfs, DIR), (DiskType::Ext4, IMAGE)]
    {
        let bed = Testbed::start(disk, &[]).await?;
        let outside = bed.dir().join("outside");
        fs::create_dir_all(outside.join("deep"))?;
        fs::write(outside.join("file"), vec![1; 5 << 20])?;
        fs::write(outside.join("deep/file"), b"deep")?;
        let before = facts(&outside)?;
        try_all(&bed, shape, &outside).await.with_context(|| format!("{shape:?} on {}", disk.as_str()))?;
        assert_eq!(facts(&outside)?, before, "{shape:?} on {}", disk.as_str());
        bed.finish().await?;
    }
    Ok(())
}

async fn try_all(bed: &Testbed, shape: Shape, outside: &Path) -> Result<()> {
    let volume = bed.csi.create("volume", shape).await?;
    let mounted = bed.mount(&volume).await?;
    plant(&mounted.target, outside, bed.data())?;

    let usage = bed.csi.stats(&mounted).await?;
    if shape.kind != berth_e2e::Kind::Image {
        // 5 MiB lie behind the links.
        ensure!(usage.iter().all(|usage| usage.used < 4 << 20), "counted what the links lead to: {usage:?}");
    }
    let snapshot = bed.csi.snapshot("snapshot", &volume.id).await?.snapshot_id;
    let clone = bed.csi.create_from("clone", shape, from_volume(&volume.id)).await?;
    let restored = bed.csi.create_from("restored", shape, from_snapshot(&snapshot)).await?;
    for copy in [&clone, &restored] {
        let in_copy = bed.mount(copy).await?;
        let link = in_copy.target.join("to-directory");
        ensure!(fs::symlink_metadata(&link)?.is_symlink(), "the link became something else");
        ensure!(fs::read_link(&link)? == outside, "the link leads elsewhere now");
        bed.csi.unmount(&in_copy).await?;
    }
    if bed.csi.expand(&volume, shape.bytes * 2).await?.node_expansion_required {
        bed.csi.node_expand(&volume, &mounted, shape.bytes * 2).await?;
    }
    bed.csi.unmount(&mounted).await?;
    bed.csi.delete_snapshot(&snapshot).await?;
    for copy in [&volume, &clone, &restored] {
        bed.csi.delete(&copy.id).await?;
    }
    bed.wait_for_empty_trash().await
}

fn plant(dir: &Path, outside: &Path, data: &Path) -> Result<()> {
    fs::create_dir(dir.join("sub"))?;
    symlink(outside, dir.join("to-directory"))?;
    symlink(outside.join("file"), dir.join("to-file"))?;
    symlink(outside.join("not-yet"), dir.join("to-nothing"))?;
    symlink("..", dir.join("up"))?;
    symlink("loop", dir.join("loop"))?;
    symlink("/", dir.join("sub/root"))?;
    // Names that the driver uses itself.
    for name in ["data", "image", "volumes", "trash", "state", "lock", "record", "data.new"] {
        symlink(outside, dir.join(name))?;
    }
    symlink(data, dir.join("sub/own"))?;
    Ok(())
}

/// All that could have changed about a tree: times included, since even a chown or chmod to the same leaves a trace.
fn facts(dir: &Path) -> Result<String> {
    let list = run("find", &[&dir.display().to_string(), "-printf", "%P %y %m %U:%G %s %T@ %C@ %n\n"])?;
    let mut lines: Vec<&str> = list.lines().collect();
    lines.sort_unstable();
    Ok(lines.join("\n"))
}

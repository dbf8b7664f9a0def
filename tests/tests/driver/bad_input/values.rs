//! Sizes, names and parameters that make no sense.

use anyhow::{Context, Result, ensure};
use berth_csi::v1::{self, volume_capability::AccessType};
use berth_e2e::{DiskType, Expected, Testbed};
use tonic::Code;

use crate::bad_input::{BTRFS, Before, DIR, IMAGE, KINDS};

#[tokio::test(flavor = "multi_thread")]
async fn impossible_sizes_are_refused() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        let before = Before::of(&bed)?;
        let cases: &[(i64, i64, &[Code])] = &[
            (-1, 0, &[Code::InvalidArgument]),
            (i64::MIN, 0, &[Code::InvalidArgument]),
            (1 << 20, -1, &[Code::InvalidArgument]),
            (2 << 20, 1 << 20, &[Code::InvalidArgument, Code::OutOfRange]),
            (i64::MAX, 0, &[Code::OutOfRange, Code::ResourceExhausted]),
            (i64::MAX - 511, i64::MAX, &[Code::OutOfRange, Code::ResourceExhausted]),
            (1 << 60, 0, &[Code::OutOfRange, Code::ResourceExhausted]),
        ];
        for (required_bytes, limit_bytes, codes) in cases {
            let range = v1::CapacityRange { required_bytes: *required_bytes, limit_bytes: *limit_bytes };
            let request = v1::CreateVolumeRequest { capacity_range: Some(range), ..shape.request("size") };
            let answer = bed.csi.create_by(*shape, request).await;
            before.refused(&bed, answer, codes).with_context(|| format!("{shape:?}: {range:?}"))?;
        }
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_not_grown_to_an_impossible_size() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        let volume = bed.csi.create("volume", *shape).await?;
        let before = Before::of(&bed)?;
        for (bytes, codes) in [
            (-5, &[Code::InvalidArgument] as &[Code]),
            (i64::MAX, &[Code::OutOfRange, Code::ResourceExhausted]),
            (1 << 50, &[Code::OutOfRange, Code::ResourceExhausted]),
        ] {
            let answer = bed.csi.expand(&volume, bytes).await;
            before.refused(&bed, answer, codes).with_context(|| format!("{shape:?} to {bytes}"))?;
        }
        let listed = bed.csi.volumes().await?;
        ensure!(listed[0].capacity_bytes == volume.bytes, "it has {} bytes now", listed[0].capacity_bytes);
        bed.csi.delete(&volume.id).await?;
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_without_a_size_gets_one() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        for range in [None, Some(v1::CapacityRange::default())] {
            let request = v1::CreateVolumeRequest { capacity_range: range, ..shape.request("volume") };
            let volume = bed.csi.create_by(*shape, request).await?;
            ensure!(volume.bytes > 0, "{shape:?} has {} bytes", volume.bytes);
            bed.csi.delete(&volume.id).await?;
        }
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_parameters_are_refused_by_name() -> Result<()> {
    let cases = [
        (DiskType::Xfs, IMAGE, "colour", "blue"),
        (DiskType::Xfs, IMAGE, "Kind", "image"),
        (DiskType::Xfs, IMAGE, "path", "../../etc"),
        (DiskType::Ext4, DIR, "colour", "blue"),
        (DiskType::Btrfs, BTRFS, "colour", "blue"),
        (DiskType::Btrfs, BTRFS, "kind", "zfs"),
        (DiskType::Btrfs, BTRFS, "kind", "../btrfs"),
        (DiskType::Ext4, DIR, "kind", "btrfs"),
    ];
    for (disk, shape, parameter, value) in cases {
        let bed = Testbed::start(disk, &[]).await?;
        let before = Before::of(&bed)?;
        let mut request = shape.request("volume");
        request.parameters.insert(parameter.into(), value.into());
        let answer = bed.csi.create_by(shape, request).await;
        let status = before.refused(&bed, answer, &[Code::InvalidArgument])?;
        ensure!(status.message().contains(parameter), "{parameter} is not named: {status}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn mutable_parameters_are_checked_before_any_is_applied() -> Result<()> {
    let cases: &[(DiskType, _, &[(&str, &str)])] = &[
        (DiskType::Btrfs, BTRFS, &[("compression", "brotli"), ("readAheadKb", "512"), ("noatime", "maybe")]),
        (
            DiskType::Xfs,
            IMAGE,
            &[("compression", "zstd"), ("readAheadKb", "-1"), ("readBps", "1e999"), ("x", "")],
        ),
        (DiskType::Ext4, DIR, &[("writeIops", "10"), ("noatime", "1"), ("../noatime", "true")]),
    ];
    for (disk, shape, bad) in cases {
        let bed = Testbed::start(*disk, &[]).await?;
        let volume = bed.csi.create("volume", *shape).await?;
        let before = Before::of(&bed)?;
        for (parameter, value) in *bad {
            let mutable: std::collections::BTreeMap<_, _> =
                [(String::from(*parameter), String::from(*value))].into();
            let request =
                v1::CreateVolumeRequest { mutable_parameters: mutable.clone(), ..shape.request("another") };
            let answer = bed.csi.create_by(*shape, request).await;
            let status = before.refused(&bed, answer, &[Code::InvalidArgument])?;
            ensure!(status.message().contains(parameter), "{parameter} is not named: {status}");
            let request = v1::ControllerModifyVolumeRequest {
                volume_id: volume.id.clone(),
                mutable_parameters: mutable,
                ..Default::default()
            };
            let answer = bed.csi.controller.clone().controller_modify_volume(request).await;
            before
                .refused(&bed, answer, &[Code::InvalidArgument])
                .with_context(|| format!("{shape:?} {parameter}={value}"))?;
        }
        bed.csi.delete(&volume.id).await?;
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_kubernetes_adds_to_the_parameters_is_no_mistake() -> Result<()> {
    let bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let mut request = IMAGE.request("volume");
    request.parameters.insert("csi.storage.k8s.io/pvc/name".into(), "claim".into());
    request.parameters.insert("csi.storage.k8s.io/pvc/namespace".into(), "default".into());
    let volume = bed.csi.create_by(IMAGE, request).await?;
    bed.csi.delete(&volume.id).await?;
    bed.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn filesystems_and_mount_options_are_not_passed_on_unread() -> Result<()> {
    let bed = Testbed::start(DiskType::Xfs, &[]).await?;
    let volume = bed.csi.create("volume", IMAGE).await?;
    let mounted = berth_e2e::Mounted::paths(&volume.id, bed.dir())?;
    let before = Before::of(&bed)?;
    for fs_type in ["../../bin/sh", "ext4 -o exec", "ntfs", "EXT4", "-h"] {
        let mut request = IMAGE.request("other");
        if let Some(AccessType::Mount(mount)) = &mut request.volume_capabilities[0].access_type {
            mount.fs_type = fs_type.into();
        }
        let answer = bed.csi.create_by(IMAGE, request).await;
        before
            .refused(&bed, answer, &[Code::InvalidArgument])
            .with_context(|| format!("fs_type {fs_type:?}"))?;
    }
    for flag in ["nonsense", "journal_path=/etc/passwd", "nonsense=../..", "nosuid,nonsense"] {
        let mut capability = IMAGE.capability();
        if let Some(AccessType::Mount(mount)) = &mut capability.access_type {
            mount.mount_flags.push(flag.into());
        }
        let request = v1::NodeStageVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: berth_e2e::csi::text(&mounted.staging),
            volume_capability: Some(capability),
            volume_context: volume.context.clone(),
            ..Default::default()
        };
        let answer = bed.csi.node.clone().node_stage_volume(request).await;
        let status = answer.err().with_context(|| format!("{flag} was taken"))?;
        ensure!(status.code() == Code::InvalidArgument, "{flag}: {status}");
        ensure!(berth_e2e::machine::mounts_below(&mounted.staging)?.is_empty(), "{flag} left a mount");
        bed.until_detached().with_context(|| format!("{flag} left a loop device"))?;
    }
    let in_order = bed.mount(&volume).await.context("after the refused options")?;
    bed.csi.unmount(&in_order).await?;
    bed.csi.delete(&volume.id).await?;
    bed.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_name_for_something_else_is_refused() -> Result<()> {
    let bed = Testbed::start(DiskType::Btrfs, &[]).await?;
    let volume = bed.csi.create("volume", BTRFS).await?;
    let other = bed.csi.create("other", BTRFS).await?;
    let snapshot = bed.csi.snapshot("snapshot", &volume.id).await?.snapshot_id;
    let before = Before::of(&bed)?;
    let larger = berth_e2e::Shape { bytes: BTRFS.bytes * 2, ..BTRFS };
    before.refused(&bed, bed.csi.create("volume", larger).await, &[Code::AlreadyExists])?;
    before.refused(&bed, bed.csi.create("volume", IMAGE).await, &[Code::AlreadyExists])?;
    before.refused(&bed, bed.csi.snapshot("snapshot", &other.id).await, &[Code::AlreadyExists])?;
    let again = bed.csi.create("volume", BTRFS).await?;
    ensure!(again.id == volume.id, "the same request made {} beside {}", again.id, volume.id);
    ensure!(bed.csi.snapshot("snapshot", &volume.id).await?.snapshot_id == snapshot, "another snapshot");
    before.unchanged(&bed)?;
    bed.csi.delete_snapshot(&snapshot).await?;
    for id in [&volume.id, &other.id] {
        bed.csi.delete(id).await?;
    }
    bed.check_leftovers(&Expected::default()).await?;
    bed.finish().await
}

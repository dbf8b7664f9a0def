//! Names, ids and paths that try to lead somewhere else.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use berth_csi::v1;
use berth_e2e::{Csi, DiskType, Expected, Kind, Mounted, Testbed, csi::from_snapshot, csi::text, machine};
use tonic::Code;

use crate::bad_input::{BTRFS, Before, DIR, IMAGE, KINDS};

/// Ids no driver gave, each meaning something to a careless path join.
const WRONG_IDS: &[&str] = &[
    "..",
    ".",
    "/",
    "/etc",
    "../state",
    "../../outside",
    "x/../../outside",
    "%2e%2e%2foutside",
    "a\0b",
    "*",
    "~",
];

/// Puts something at a target path, given a directory that must not be touched.
type PlantObstacle = fn(&Path, &Path) -> std::io::Result<()>;

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_only_a_name() -> Result<()> {
    let names = [
        "../../outside",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "~root",
        "name with spaces",
        "ünïcödé",
        "*",
        "$(id)",
    ];
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        let before = Before::of(&bed)?;
        for name in names {
            let volume = bed.csi.create(name, *shape).await.with_context(|| format!("volume {name:?}"))?;
            let snapshot =
                bed.csi.snapshot(name, &volume.id).await.with_context(|| format!("snapshot {name:?}"))?;
            let made = Expected {
                volumes: [volume.id.clone()].into(),
                snapshots: [snapshot.snapshot_id.clone()].into(),
            };
            bed.check_entries(&made).with_context(|| format!("{name:?}"))?;
            bed.csi.delete_snapshot(&snapshot.snapshot_id).await?;
            bed.csi.delete(&volume.id).await?;
        }
        bed.wait_for_empty_trash().await?;
        let outside = |line: &&String| !line.starts_with("disk/data/");
        let now = crate::bad_input::around(bed.dir())?;
        assert!(before.everything.iter().filter(outside).eq(now.iter().filter(outside)), "{now:?}");
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_control_characters_or_of_megabytes_are_refused() -> Result<()> {
    let bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let before = Before::of(&bed)?;
    for name in ["", "a\nb", "a\0b", "\u{7f}", &"n".repeat(129), &"n".repeat(3 << 20)] {
        before.refused(&bed, bed.csi.create(name, DIR).await, &[Code::InvalidArgument])?;
    }
    bed.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_nobody_gave_leads_nowhere() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        fs::create_dir(bed.disk().mount_point().join("outside"))?;
        let volume = bed.csi.create("volume", *shape).await?;
        let mounted = Mounted::paths("wrong", bed.dir())?;
        let before = Before::of(&bed)?;
        let absent = &[Code::NotFound, Code::InvalidArgument];
        for id in WRONG_IDS {
            let mut wrong = volume.clone();
            wrong.id = (*id).into();
            // What is not there is deleted already, unless it could never have been there.
            for deleted in [bed.csi.delete(id).await, bed.csi.delete_snapshot(id).await] {
                deleted.or_else(
                    |status| {
                        if status.code() == Code::InvalidArgument { Ok(()) } else { Err(status) }
                    },
                )?;
                before.unchanged(&bed).with_context(|| format!("deleting {id:?}"))?;
            }
            before.refused(&bed, bed.csi.snapshot("snapshot", id).await, absent)?;
            before.refused(&bed, bed.csi.expand(&wrong, shape.bytes * 2).await, absent)?;
            before.refused(&bed, bed.csi.stage(&wrong, &mounted.staging).await, absent)?;
            before.refused(&bed, bed.csi.create_from("new", *shape, from_snapshot(id)).await, absent)?;
            let publish = bed.csi.publish(&wrong, &mounted.staging, &mounted.target).await;
            before.refused(
                &bed,
                publish,
                &[Code::NotFound, Code::InvalidArgument, Code::FailedPrecondition],
            )?;
            let request = v1::ControllerGetVolumeRequest { volume_id: (*id).into() };
            before.refused(&bed, bed.csi.controller.clone().controller_get_volume(request).await, absent)?;
        }
        bed.csi.delete(&volume.id).await?;
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_of_ten_megabytes_is_refused_and_the_driver_lives_on() -> Result<()> {
    let bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let before = Before::of(&bed)?;
    for length in [3 << 20, 10 << 20] {
        let id = "x".repeat(length);
        // The transport refuses what is larger than its 4 MiB with a code of its own.
        let codes = &[Code::InvalidArgument, Code::OutOfRange, Code::ResourceExhausted];
        before.refused(&bed, bed.csi.delete(&id).await, codes)?;
        before.refused(&bed, bed.csi.snapshot("snapshot", &id).await, codes)?;
    }
    ensure!(bed.csi.probe().await?, "the driver is no longer ready");
    bed.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn target_paths_must_be_plain_and_absolute() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        let volume = bed.csi.create("volume", *shape).await?;
        let mounted = Mounted::paths(&volume.id, bed.dir())?;
        bed.csi.stage(&volume, &mounted.staging).await?;
        let before = Before::of(&bed)?;
        let up = bed.dir().join("pods/../outside");
        let bad: &[&Path] =
            &[Path::new("relative"), Path::new("./x"), Path::new("../x"), &up, Path::new("/")];
        for target in bad {
            let answer = bed.csi.publish(&volume, &mounted.staging, target).await;
            before
                .refused(&bed, answer, &[Code::InvalidArgument])
                .with_context(|| format!("target {}", target.display()))?;
        }
        bed.csi.unstage(&volume.id, &mounted.staging).await?;
        let before = Before::of(&bed)?;
        for staging in bad {
            let answer = bed.csi.stage(&volume, staging).await;
            before
                .refused(&bed, answer, &[Code::InvalidArgument])
                .with_context(|| format!("staging {}", staging.display()))?;
        }
        bed.csi.delete(&volume.id).await?;
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_is_something_else_is_left_alone() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        let volume = bed.csi.create("volume", *shape).await?;
        let mounted = Mounted::paths(&volume.id, bed.dir())?;
        bed.csi.stage(&volume, &mounted.staging).await?;
        let precious = bed.dir().join("precious");
        fs::create_dir(&precious)?;
        fs::write(precious.join("file"), b"precious")?;
        let obstacles: [(&str, PlantObstacle); 4] = [
            ("a symlink to a directory", |target, precious| symlink(precious, target)),
            ("a symlink to a file", |target, precious| symlink(precious.join("file"), target)),
            ("a symlink to nothing", |target, precious| symlink(precious.join("nothing"), target)),
            ("a file with content", |target, _| fs::write(target, b"mine")),
        ];
        for (what, place) in obstacles {
            place(&mounted.target, &precious)?;
            let before = Before::of(&bed)?;
            let answer = bed.csi.publish(&volume, &mounted.staging, &mounted.target).await;
            let codes =
                &[Code::InvalidArgument, Code::FailedPrecondition, Code::AlreadyExists, Code::Internal];
            before.refused(&bed, answer, codes).with_context(|| format!("{shape:?}: {what}"))?;
            assert_eq!(fs::read(precious.join("file"))?, b"precious");
            fs::remove_file(&mounted.target)?;
        }
        // An unpublish must not take away what it did not make, either.
        symlink(&precious, &mounted.target)?;
        let _ = bed.csi.unpublish(&volume.id, &mounted.target).await;
        assert_eq!(fs::read(precious.join("file"))?, b"precious");
        let _ = fs::remove_file(&mounted.target);
        bed.csi.unstage(&volume.id, &mounted.staging).await?;
        bed.csi.delete(&volume.id).await?;
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_staging_path_through_a_symlink_at_its_end_is_refused() -> Result<()> {
    let bed = Testbed::start(DiskType::Xfs, &[]).await?;
    let volume = bed.csi.create("volume", IMAGE).await?;
    let precious = bed.dir().join("precious");
    fs::create_dir(&precious)?;
    let staging = bed.dir().join("staging");
    symlink(&precious, &staging)?;
    let before = Before::of(&bed)?;
    let answer = bed.csi.stage(&volume, &staging).await;
    before.refused(&bed, answer, &[Code::InvalidArgument, Code::FailedPrecondition, Code::Internal])?;
    bed.until_detached()?;
    bed.csi.delete(&volume.id).await?;
    bed.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_data_directory_is_no_place_to_publish_to() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        let volume = bed.csi.create("volume", *shape).await?;
        let mounted = Mounted::paths(&volume.id, bed.dir())?;
        bed.csi.stage(&volume, &mounted.staging).await?;
        let before = Before::of(&bed)?;
        for inside in ["volumes/new", "state/new", "trash/new", "new"] {
            let target = bed.data().join(inside);
            let answer = bed.csi.publish(&volume, &mounted.staging, &target).await;
            before
                .refused(&bed, answer, &[Code::InvalidArgument, Code::FailedPrecondition])
                .context(inside)?;
        }
        bed.csi.unstage(&volume.id, &mounted.staging).await?;
        bed.csi.delete(&volume.id).await?;
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn staging_on_another_filesystem_works() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        let elsewhere = bed.dir().join("tmpfs");
        fs::create_dir(&elsewhere)?;
        machine::run("mount", &["-t", "tmpfs", "tmpfs", &text(&elsewhere)])?;
        let volume = bed.csi.create("volume", *shape).await?;
        let mounted = bed.csi.mount(&volume, &elsewhere).await?;
        fs::write(mounted.target.join("file"), b"here")?;
        if shape.kind == Kind::Image {
            assert_eq!(fs::read(mounted.staging.join("file"))?, b"here");
        }
        bed.csi.unmount(&mounted).await?;
        bed.csi.delete(&volume.id).await?;
        machine::run("umount", &[&text(&elsewhere)])?;
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn another_volumes_paths_are_not_taken_down() -> Result<()> {
    let bed = Testbed::start(DiskType::Btrfs, &[]).await?;
    let (one, two) = (bed.csi.create("one", BTRFS).await?, bed.csi.create("two", IMAGE).await?);
    let (in_one, in_two) = (bed.mount(&one).await?, bed.mount(&two).await?);
    fs::write(in_two.target.join("file"), b"two")?;
    // The orchestrator mixed them up. Whatever the answer, the other volume stays where it is.
    let _ = bed.csi.unpublish(&one.id, &in_two.target).await;
    let _ = bed.csi.unstage(&one.id, &in_two.staging).await;
    assert_eq!(fs::read(in_two.target.join("file")).ok().as_deref(), Some(b"two".as_slice()));
    let before = Before::of(&bed)?;
    let crossed = Csi::publish_request(&one, &in_one.staging, &in_two.target);
    let answer = bed.csi.node.clone().node_publish_volume(crossed).await;
    before.refused(&bed, answer, &[Code::AlreadyExists, Code::FailedPrecondition, Code::InvalidArgument])?;
    for (volume, mounted) in [(&one, &in_one), (&two, &in_two)] {
        bed.csi.unmount(mounted).await?;
        bed.csi.delete(&volume.id).await?;
    }
    bed.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mounted_volume_is_not_deleted() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        let volume = bed.csi.create("volume", *shape).await?;
        let mounted = bed.mount(&volume).await?;
        fs::write(mounted.target.join("file"), b"in use")?;
        let before = Before::of(&bed)?;
        before.refused(&bed, bed.csi.delete(&volume.id).await, &[Code::FailedPrecondition])?;
        assert_eq!(fs::read(mounted.target.join("file"))?, b"in use");
        bed.csi.unpublish(&volume.id, &mounted.target).await?;
        let before = Before::of(&bed)?;
        before
            .refused(&bed, bed.csi.delete(&volume.id).await, &[Code::FailedPrecondition])
            .context("staged")?;
        bed.csi.unstage(&volume.id, &mounted.staging).await?;
        bed.csi.delete(&volume.id).await?;
        let gone: PathBuf = bed.data().join("volumes").join(berth_e2e::name_on_disk(&volume.id));
        ensure!(!gone.exists(), "{} is still there", gone.display());
        bed.finish().await?;
    }
    Ok(())
}

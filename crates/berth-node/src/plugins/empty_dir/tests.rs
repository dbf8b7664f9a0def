//! Directories on disk and in memory, as pods get them and after crashes.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use berth_host::mount;
use rustix::fs::IFlags;
use serde_json::{Value, json};

use super::super::tests::{Bench, UID, mode, object_of, pod, volume, volume_of};
use super::*;

const DISK: &str = "";

fn empty(medium: &str, limit: Option<&str>) -> Value {
    json!({ "emptyDir": { "medium": medium, "sizeLimit": limit } })
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_everybodys_stays_as_it_is_and_goes_with_the_pod() {
    for medium in [DISK, "Memory"] {
        let bench = Bench::new().await;
        let volume = volume(empty(medium, None));
        let path = bench.set_up(&volume).await;
        assert_eq!(path, bench.layout.pod_volume(UID, "kubernetes.io/empty-dir", "vol"));
        assert_eq!(mode(&path) & 0o777, 0o777);
        assert_eq!(mount::is_mount_point(&path).unwrap(), medium == "Memory");

        fs::write(path.join("file"), "kept").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o711)).unwrap();
        assert_eq!(bench.set_up(&volume).await, path);
        assert_eq!(fs::read(path.join("file")).unwrap(), b"kept");
        assert_eq!(mode(&path), 0o711, "it is the pod's now");
        assert!(bench.mounted().len() <= 1, "nothing is mounted twice");

        bench.tear_down(&volume).await;
        bench.assert_clean();
        bench.tear_down(&volume).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_goes_with_its_pod_whatever_was_made_immutable_or_mounted_in_it() {
    for medium in [DISK, "Memory"] {
        let bench = Bench::new().await;
        let volume = volume(empty(medium, None));
        let path = bench.set_up(&volume).await;
        let (deep, other) = (path.join("deep/deeper"), path.join("other"));
        fs::create_dir_all(&deep).unwrap();
        fs::create_dir_all(&other).unwrap();
        fs::write(deep.join("file"), "").unwrap();
        let odd = OsStr::from_bytes(b"\xff\xfe");
        fs::write(path.join(odd), "").unwrap();
        // A mount on a mount, read-only, as somebody on the machine could leave it.
        let read_only = mount::Attributes { read_only: true, ..mount::Attributes::default() };
        mount::filesystem("none".as_ref(), &other, "tmpfs", mount::Attributes::default(), &[]).unwrap();
        fs::create_dir(other.join("nested")).unwrap();
        mount::bind(&deep, &other.join("nested"), read_only).unwrap();
        if medium == DISK {
            let (immutable, append) = (IFlags::IMMUTABLE, IFlags::APPEND);
            let protected =
                [(path.join(odd), immutable), (deep.join("file"), append), (deep, append), (path, immutable)];
            for (path, attribute) in protected {
                let file = fs::File::open(path).unwrap();
                let attributes = rustix::fs::ioctl_getflags(&file).unwrap();
                rustix::fs::ioctl_setflags(&file, attributes | attribute).unwrap();
            }
        }
        bench.tear_down(&volume).await;
        bench.assert_clean();
        bench.tear_down(&volume).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_crash_before_the_mark_the_work_is_completed() {
    for medium in [DISK, "Memory"] {
        let bench = Bench::new().await;
        let volume = volume(empty(medium, None));
        let path = bench.set_up(&volume).await;
        let marker = bench.layout.pod_plugin(UID, "kubernetes.io/empty-dir", "vol").join("ready");
        assert!(marker.exists());
        fs::remove_file(&marker).unwrap();
        bench.set_up(&volume).await;
        assert!(marker.exists());
        assert!(bench.mounted().len() <= 1, "nothing is mounted twice");

        // A teardown that removed the marker, and maybe the mount, and then crashed.
        fs::remove_file(&marker).unwrap();
        mount::unmount(&path).unwrap();
        bench.tear_down(&volume).await;
        bench.assert_clean();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_without_a_directory_or_a_mount_counts_for_nothing() {
    let bench = Bench::new().await;
    let on_disk = volume(empty(DISK, None));
    fs::remove_dir(bench.set_up(&on_disk).await).unwrap();
    assert!(bench.set_up(&on_disk).await.is_dir());
    bench.tear_down(&on_disk).await;

    // As after a reboot.
    let in_memory = volume(empty("Memory", None));
    let path = bench.set_up(&in_memory).await;
    mount::unmount(&path).unwrap();
    bench.set_up(&in_memory).await;
    assert!(mount::is_mount_point(&path).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_ends_at_the_size_limit() {
    let bench = Bench::new().await;
    let path = bench.set_up(&volume(empty("Memory", Some("64Ki")))).await;
    let found = mount::mount_of(&path).unwrap().unwrap();
    assert_eq!(found.fs_type, "tmpfs");
    assert!(found.super_options.contains("size=64k"), "{}", found.super_options);
    let error = fs::write(path.join("file"), vec![0; 128 << 10]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pods_group_owns_it() {
    let bench = Bench::new().await;
    for medium in [DISK, "Memory"] {
        let volume = volume_of(pod(json!({ "securityContext": { "fsGroup": 4321 } })), empty(medium, None));
        let path = bench.set_up(&volume).await;
        assert_eq!(fs::metadata(&path).unwrap().gid(), 4321);
        assert_eq!(mode(&path) & 0o2777, 0o2777);
        bench.tear_down(&volume).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_medium_that_is_none_is_refused() {
    let bench = Bench::new().await;
    assert_eq!(bench.refused(&volume(empty("Tape", None))).await, "unknown storage medium \"Tape\"");
    let refused = bench.refused(&volume(empty("HugePages-2Mi", None))).await;
    assert!(
        refused.contains("no container of the pod has a request or limit for hugepages-2Mi"),
        "{refused}"
    );
    bench.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn huge_pages_are_those_of_the_pod() {
    let bench = Bench::new().await;
    let resources = json!({ "limits": { "hugepages-2Mi": "2Mi", "memory": "64Mi" } });
    let of_pod = || pod(json!({ "containers": [{ "name": "main", "resources": resources }] }));
    for medium in ["HugePages", "HugePages-2Mi"] {
        let volume = volume_of(of_pod(), empty(medium, None));
        let path = bench.set_up(&volume).await;
        let found = mount::mount_of(&path).unwrap().unwrap();
        assert_eq!(found.fs_type, "hugetlbfs");
        assert!(found.super_options.contains("pagesize=2M"), "{}", found.super_options);
        assert_eq!(mode(&path) & 0o777, 0o777);
        bench.set_up(&volume).await;
        bench.tear_down(&volume).await;
        bench.assert_clean();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_are_paths_reach_nothing() {
    let bench = Bench::new().await;
    let outside = bench.layout.root().join("outside");
    fs::create_dir_all(&outside).unwrap();
    let plugin = bench.plugin(&volume(empty(DISK, None))).clone();
    for (uid, name) in
        [("..", "vol"), ("../..", "vol"), (UID, "../../../../outside"), (UID, ".."), ("", "vol")]
    {
        let placed =
            Placed { plugin: String::new(), pod_uid: uid.into(), spec_name: name.into(), block: false };
        assert!(plugin.tear_down(&placed).await.is_err(), "{uid:?} {name:?}");
    }
    assert!(outside.exists());
}

#[test]
fn the_least_limit_counts() {
    let node = NodeFacts { allocatable: object_of(json!({ "memory": "1Gi" })), ..NodeFacts::default() };
    let limited = |limit: &str| json!({ "name": "c", "resources": { "limits": { "memory": limit } } });
    let sidecar = |limit: &str| json!({ "name": "s", "restartPolicy": "Always", "resources": { "limits": { "memory": limit } } });
    for (size, spec, expected) in [
        (None, json!({}), 1 << 30),
        (Some("1Mi"), json!({}), 1 << 20),
        (Some("0"), json!({}), 1 << 30),
        (Some("2Gi"), json!({}), 1 << 30),
        (Some("8Mi"), json!({ "containers": [limited("1Mi"), limited("2Mi")] }), 3 << 20),
        (Some("1Mi"), json!({ "containers": [limited("1Mi"), limited("2Mi")] }), 1 << 20),
        (None, json!({ "containers": [limited("1Mi"), { "name": "free" }] }), 1 << 30),
        (None, json!({ "containers": [limited("1Mi")], "initContainers": [limited("9Mi")] }), 9 << 20),
        (None, json!({ "containers": [limited("1Mi")], "initContainers": [sidecar("9Mi")] }), 10 << 20),
        (
            None,
            json!({ "containers": [limited("9Mi")], "resources": { "limits": { "memory": "5Mi" } } }),
            5 << 20,
        ),
    ] {
        let source = object_of::<EmptyDirVolumeSource>(json!({ "medium": "Memory", "sizeLimit": size }));
        assert_eq!(memory_size(&source, &pod(spec.clone()), &node), Some(expected), "{size:?} {spec}");
    }
}

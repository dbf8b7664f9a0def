//! Every type of path against everything that can be there.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use serde_json::json;

use super::super::tests::{mode, persistent, volume};
use super::*;

const TYPES: [&str; 7] =
    ["DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"];

fn plugin() -> HostPath {
    HostPath { layout: Layout::new("/node") }
}

async fn set_up(path: &Path, kind: &str) -> Result<PathBuf, String> {
    let volume = volume(json!({ "hostPath": { "path": path, "type": kind } }));
    assert!(plugin().serves(&volume.source));
    plugin().set_up(&volume).await.map(|ready| ready.path).map_err(|failed| failed.message)
}

#[tokio::test]
async fn each_type_takes_what_it_names_and_nothing_else() {
    let scratch = tempfile::tempdir().unwrap();
    let (directory, file, socket) =
        (scratch.path().join("directory"), scratch.path().join("file"), scratch.path().join("socket"));
    fs::create_dir(&directory).unwrap();
    fs::write(&file, "").unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    symlink(&directory, scratch.path().join("link")).unwrap();
    let cases = [
        (directory.clone(), ["DirectoryOrCreate", "Directory"].as_slice()),
        (scratch.path().join("link"), &["DirectoryOrCreate", "Directory"]),
        (file, &["FileOrCreate", "File"]),
        (socket, &["Socket"]),
        ("/dev/null".into(), &["CharDevice"]),
    ];
    for (path, fits) in cases {
        for kind in TYPES {
            let expected = if fits.contains(&kind) {
                Ok(fs::canonicalize(&path).unwrap())
            } else {
                let noun = match kind {
                    "Directory" | "DirectoryOrCreate" => "a directory",
                    "File" | "FileOrCreate" => "a file",
                    "Socket" => "a socket file",
                    "CharDevice" => "a character device",
                    _ => "a block device",
                };
                Err(format!("hostPath type check failed: {} is not {noun}", path.display()))
            };
            assert_eq!(set_up(&path, kind).await, expected, "{kind}");
        }
        assert_eq!(set_up(&path, "").await, Ok(fs::canonicalize(&path).unwrap()));
        assert_eq!(set_up(&path, "Tape").await, Err("Tape is an invalid volume type".to_owned()));
    }
}

#[tokio::test]
async fn what_is_missing_is_made_only_where_the_type_says_so() {
    let scratch = tempfile::tempdir().unwrap();
    let missing = scratch.path().join("a/b");
    for kind in ["Directory", "File", "Socket", "CharDevice", "BlockDevice"] {
        assert!(set_up(&missing, kind).await.is_err(), "{kind}");
    }
    assert_eq!(set_up(&missing, "").await, Ok(missing.clone()));
    assert!(!scratch.path().join("a").exists());

    let refused = set_up(&missing, "FileOrCreate").await.unwrap_err();
    assert!(refused.starts_with(&format!("make the file {}: No such file", missing.display())), "{refused}");
    set_up(&missing, "DirectoryOrCreate").await.unwrap();
    assert_eq!(mode(&missing), 0o755);
    let file = missing.join("file");
    set_up(&file, "FileOrCreate").await.unwrap();
    assert_eq!((mode(&file), fs::read(&file).unwrap().len()), (0o644, 0));
    fs::write(&file, "kept").unwrap();
    set_up(&file, "FileOrCreate").await.unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"kept");
}

#[tokio::test]
async fn a_way_back_is_refused() {
    let refused = set_up(Path::new("/tmp/../etc"), "").await.unwrap_err();
    assert_eq!(refused, "invalid HostPath `/tmp/../etc`: must not contain '..'");
    assert!(set_up(Path::new("/tmp/a..b"), "").await.is_ok());
}

#[tokio::test]
async fn a_persistent_volume_of_the_host_serves_too_and_nothing_is_removed() {
    let scratch = tempfile::tempdir().unwrap();
    let volume = persistent(json!({ "hostPath": { "path": scratch.path(), "type": "Directory" } }));
    assert!(plugin().serves(&volume.source));
    assert_eq!(plugin().set_up(&volume).await.unwrap().path, scratch.path());
    fs::write(scratch.path().join("file"), "").unwrap();
    let placed = Placed {
        plugin: plugin().name().to_owned(),
        pod_uid: volume.pod_uid().to_owned(),
        spec_name: volume.spec_name().to_owned(),
        block: false,
    };
    plugin().tear_down(&placed).await.unwrap();
    assert!(scratch.path().join("file").exists());
}

#[tokio::test]
async fn the_kubelets_directory_is_this_nodes() {
    let node = tempfile::tempdir().unwrap();
    fs::create_dir(node.path().join("pods")).unwrap();
    let plugin = HostPath { layout: Layout::new(node.path()) };
    for (asked, expected) in [
        ("/var/lib/kubelet", node.path().to_owned()),
        ("/var/lib/kubelet/", node.path().to_owned()),
        ("/var/lib/kubelet/pods", node.path().join("pods")),
        ("/var/lib/kubeletx", PathBuf::from("/var/lib/kubeletx")),
    ] {
        let volume = volume(json!({ "hostPath": { "path": asked } }));
        let ready = plugin.set_up(&volume).await.map_err(|failed| failed.message).unwrap();
        assert_eq!(ready.path, expected, "{asked}");
    }
}

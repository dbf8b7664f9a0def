//! Volumes that are images, by the kernel's client: loop devices on files of another machine.

use std::{fs, io::Write as _, path::Path};

use berth_backends::NodeExpanded;
use berth_core::{AccessMode, CapacityRange};

use crate::{
    calls::Calls as _,
    kernel::{EXPORT, Scratch, VERSIONS, backend, class, new_volume, publish_as, serve, unpublish},
};

const ONCE: AccessMode = AccessMode::SingleNodeWriter;
const MIB: u64 = 1 << 20;

/// Writes until there is no room, and returns how much there was.
fn fill(path: &Path) -> u64 {
    let mut file = fs::File::create(path).unwrap();
    let chunk = vec![7; 1 << 20];
    let mut written = 0;
    let full = loop {
        match file.write_all(&chunk).and_then(|()| file.sync_data()) {
            Ok(()) => written += MIB,
            Err(error) => break error,
        }
    };
    assert_eq!(full.raw_os_error(), Some(rustix::io::Errno::NOSPC.raw_os_error()), "{full}");
    written
}

fn claims(name: &str) -> usize {
    let names = fs::read_dir(Path::new(EXPORT).join(name)).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().starts_with(".used-by-")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_has_its_size_and_grows_while_it_is_used() {
    serve();
    for version in VERSIONS {
        let scratch = Scratch::new();
        let backend = backend(scratch.path()).await;
        let name = format!("image-{}", version.replace('.', "-"));
        let new =
            new_volume(&name, 32, ONCE, class(version, &[("kind", "image"), ("mountPermissions", "0770")]));
        assert!(backend.find_made(&new).await.unwrap().is_none());
        let volume = backend.create_volume(new).await.unwrap();
        let target = scratch.path().join("target");
        publish_as(&backend, &volume, &target, ONCE).await.unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(&target).unwrap()) & 0o7777, 0o770);
        let before = fill(&target.join("large"));
        assert!((16 * MIB..32 * MIB).contains(&before), "version {version}: {before}");
        let range = CapacityRange::new(64 << 20, 0).unwrap();
        let grown = backend.expand_volume(&volume.id, range).await.unwrap();
        assert!(grown.node_expansion_required && grown.capacity.bytes() == 64 * MIB);
        let done = backend.expand_on_node(&volume, &target, range).await.unwrap();
        assert_eq!(done, NodeExpanded::Done(grown.capacity), "version {version}");
        let usage = backend.usage(&volume, &target).await.unwrap();
        assert!(usage.bytes.total > 48 * MIB && usage.bytes.total <= 64 * MIB, "{usage:?}");
        let after = before + fill(&target.join("more"));
        assert!((48 * MIB..64 * MIB).contains(&after), "version {version}: {after}");
        fs::write(target.join("large"), "kept").unwrap();
        assert_eq!(claims(&name), 1);
        unpublish(&backend, &target).await;
        assert!(scratch.mounts().is_empty(), "{:?}", scratch.mounts());
        assert!(!berth_host::loopdev::is_backing_below(scratch.path()).unwrap());
        assert_eq!(claims(&name), 0);
        publish_as(&backend, &volume, &target, ONCE).await.unwrap();
        assert_eq!(fs::read_to_string(target.join("large")).unwrap(), "kept");
        unpublish(&backend, &target).await;
        backend.delete_volume(&volume.id).await.unwrap();
    }
}

//! Project quotas of the server's own filesystem: the size of a directory is a wall, over NFS too.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use berth_backends::{ContentSource, Error, Parameters, nfs::Nfs};
use berth_core::{AccessMode, CapacityRange};
use berth_host::{path::Dir, quota};

use crate::{
    calls::Calls as _,
    kernel::{EXPORT, Scratch, config, new_volume, publish_as, run, serve, unpublish},
};

const MANY: AccessMode = AccessMode::MultiNodeMultiWriter;
const MIB: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(60);

/// A filesystem below what is exported, gone with the test.
struct Disk {
    name: String,
    path: PathBuf,
    image: PathBuf,
}

impl Disk {
    fn new(fs_type: &str, options: &str) -> Self {
        let name = format!("{fs_type}-{}", if options.is_empty() { "plain" } else { "limited" });
        let disk = Self { path: Path::new(EXPORT).join(&name), image: Path::new("/run").join(&name), name };
        fs::create_dir_all(&disk.path).unwrap();
        fs::File::create(&disk.image).unwrap().set_len(512 << 20).unwrap();
        let image = disk.image.to_str().unwrap();
        match fs_type {
            "ext4" => run("mkfs.ext4", &["-q", "-O", "quota,project", image]),
            _ => run("mkfs.xfs", &["-q", image]),
        }
        let options = if options.is_empty() { "loop".to_owned() } else { format!("loop,{options}") };
        run("mount", &["-o", &options, image, disk.path.to_str().unwrap()]);
        let export = "rw,sync,no_root_squash,insecure,no_subtree_check";
        let number = if fs_type == "ext4" { 11 } else { 12 };
        run("exportfs", &["-o", &format!("{export},fsid={number}"), &format!("*:{}", disk.path.display())]);
        disk
    }

    fn share(&self, version: &str) -> String {
        if version == "3" { self.path.display().to_string() } else { format!("/{}", self.name) }
    }

    fn class(&self, version: &str) -> Parameters {
        let (share, options) = (self.share(version), format!("vers={version}"));
        [("server", "127.0.0.1"), ("share", &share), ("mountOptions", &options), ("mountPermissions", "0777")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into()
    }

    /// A driver on the server's host, which knows where the share is.
    async fn backend(&self, dir: &Path, version: &str) -> Nfs {
        let mut config = config(dir);
        config.export_roots = vec![format!("127.0.0.1:{}={}", self.share(version), self.path.display())];
        Nfs::start(config).await.unwrap()
    }

    fn projects(&self) -> Vec<String> {
        let names = fs::read_dir(self.path.join(".berth/projects")).unwrap();
        names.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned()).collect()
    }

    fn dir(&self, name: &str) -> Dir {
        Dir::open(&self.path.join(name)).unwrap()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let path = self.path.to_str().unwrap();
        let _ = berth_host::exec::run("exportfs", ["-u", &format!("*:{path}")], SOON);
        let _ = berth_host::exec::run("exportfs", ["-f"], SOON);
        let _ = berth_host::mount::unmount_lazily(&self.path);
        let _ = fs::remove_file(&self.image);
    }
}

/// Writes so many mebibytes as an ordinary user (root passes ext4's limits), and returns whether they fit.
fn fits(file: &Path, mebibytes: u64) -> bool {
    let (to, count) = (format!("of={}", file.display()), format!("count={mebibytes}"));
    let user = ["--reuid=1000", "--regid=1000", "--clear-groups"];
    let copy = ["dd", "if=/dev/zero", &to, "bs=1M", &count, "conv=fsync"];
    let args = user.into_iter().chain(copy);
    let done = berth_host::exec::run_accepting("setpriv", args, SOON, &[0, 1]).unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    let is_full = said.contains("quota exceeded") || said.contains("No space left");
    assert_eq!(is_full, done.code != 0, "{said}");
    !is_full
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_takes_its_size_and_no_more() {
    serve();
    for fs_type in ["ext4", "xfs"] {
        let disk = Disk::new(fs_type, "prjquota");
        for version in ["3", "4.2"] {
            let scratch = Scratch::new();
            let backend = disk.backend(scratch.path(), version).await;
            let name = format!("limited-{}", version.replace('.', "-"));
            let new = new_volume(&name, 16, MANY, disk.class(version));
            assert!(backend.find_made(&new).await.unwrap().is_none());
            let volume = backend.create_volume(new.clone()).await.unwrap();
            let other = backend
                .create_volume(new_volume(&format!("{name}-other"), 64, MANY, disk.class(version)))
                .await
                .unwrap();
            let project = quota::project(&disk.dir(&name)).unwrap();
            assert!(project.inherited && project.id >= 1 << 30, "{project:?}");
            assert_ne!(project.id, quota::project(&disk.dir(&format!("{name}-other"))).unwrap().id);
            assert_eq!(disk.projects().len(), 2);

            let (target, beside) = (scratch.path().join("target"), scratch.path().join("beside"));
            publish_as(&backend, &volume, &target, MANY).await.unwrap();
            publish_as(&backend, &other, &beside, MANY).await.unwrap();
            // What a filesystem needs for itself may be a little more than the limit.
            let is_full = |mebibytes: u64| {
                let counted = quota::usage(&disk.dir(""), project.id).unwrap();
                let (least, most) = ((mebibytes - 4) * MIB, mebibytes * MIB + 64 * 1024);
                assert!((least..=most).contains(&counted.bytes), "{fs_type}, version {version}: {counted:?}");
            };
            assert!(!fits(&target.join("file"), 40), "{fs_type}, version {version}");
            is_full(16);
            assert!(fits(&beside.join("file"), 40), "the other has its own limit");
            let usage = backend.usage(&volume, &target).await.unwrap();
            assert_eq!(usage.bytes.total, 16 * MIB);
            assert!(usage.bytes.used > 12 * MIB && usage.bytes.available < 4 * MIB, "{usage:?}");
            assert_eq!(usage.inodes.unwrap().used, 2);

            let wider = CapacityRange::new(32 << 20, 0).unwrap();
            assert!(!backend.expand_volume(&volume.id, wider).await.unwrap().node_expansion_required);
            assert!(!fits(&target.join("more"), 40), "{fs_type}, version {version}");
            is_full(32);

            // As if its maker had been killed before it was set.
            quota::set_project(&disk.dir(&name), 7).unwrap();
            quota::set_limit(&disk.dir(""), project.id, None).unwrap();
            let again = disk.backend(scratch.path(), version).await;
            let wanted = new_volume(&name, 32, MANY, disk.class(version));
            assert!(again.find_made(&wanted).await.unwrap().is_some());
            assert_eq!(quota::project(&disk.dir(&name)).unwrap(), project);
            assert_eq!(quota::usage(&disk.dir(""), project.id).unwrap().limit, Some(32 * MIB));

            for target in [&target, &beside] {
                unpublish(&backend, target).await;
            }
            for volume in [&volume, &other] {
                backend.delete_volume(&volume.id).await.unwrap();
            }
            backend.drain(SOON).await;
            // A server of version 4 keeps a removed file as long as it believes that somebody has it open.
            let deadline = Instant::now() + SOON;
            loop {
                let left = quota::usage(&disk.dir(""), project.id).unwrap();
                assert_eq!(left.limit, None, "{fs_type}, version {version}");
                if left == quota::ProjectUsage::default() || version != "3" {
                    break;
                }
                assert!(Instant::now() < deadline, "{fs_type}, version {version}: {left:?}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            assert!(!disk.path.join(&name).exists());
            assert!(disk.projects().is_empty(), "{:?}", disk.projects());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_counts_from_its_first_byte() {
    serve();
    for fs_type in ["ext4", "xfs"] {
        let disk = Disk::new(fs_type, "prjquota");
        let scratch = Scratch::new();
        let backend = disk.backend(scratch.path(), "4.2").await;
        let source = backend.create_volume(new_volume("source", 16, MANY, disk.class("4.2"))).await.unwrap();
        fs::write(disk.path.join("source/file"), vec![7; 4 << 20]).unwrap();
        let mut new = new_volume("clone", 16, MANY, disk.class("4.2"));
        new.source = Some(ContentSource::Volume(source.id.clone()));
        backend.create_volume(new).await.unwrap();
        let project = quota::project(&disk.dir("clone")).unwrap();
        let used = quota::usage(&disk.dir(""), project.id).unwrap();
        assert!(used.bytes >= 4 * MIB && used.limit == Some(16 * MIB), "{used:?}");
        assert_ne!(project.id, quota::project(&disk.dir("source")).unwrap().id);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_without_quotas_or_another_place_is_refused() {
    serve();
    let scratch = Scratch::new();
    let plain = Disk::new("xfs", "");
    let refused = async |root: &str| {
        let mut config = config(scratch.path());
        config.export_roots = vec![root.to_owned()];
        match Nfs::start(config).await {
            Err(Error::Invalid(sentence)) => sentence,
            other => panic!("{root}: {other:?}"),
        }
    };
    assert!(refused(&format!("127.0.0.1:/={}", plain.path.display())).await.contains("prjquota"));
    assert!(refused(&format!("127.0.0.1:/={EXPORT}")).await.contains("prjquota"));
    assert!(refused("127.0.0.1:/=/no/such/directory").await.contains("No such file"));
    assert!(refused("127.0.0.1:/export").await.contains("\"=/\""));

    let disk = Disk::new("ext4", "prjquota");
    fs::create_dir(disk.path.join("elsewhere")).unwrap();
    let mut wrong = config(scratch.path());
    wrong.export_roots = vec![format!("127.0.0.1:{}={}/elsewhere", disk.share("4.2"), disk.path.display())];
    let backend = Nfs::start(wrong).await.unwrap();
    let made = backend.create_volume(new_volume("pvc-1", 16, MANY, disk.class("4.2"))).await;
    let Err(Error::Precondition(sentence)) = made else { panic!("{made:?}") };
    assert!(sentence.contains("--export-root") && sentence.contains("elsewhere"), "{sentence}");
    assert!(!disk.path.join("pvc-1").exists(), "nothing is made");
    assert!(!disk.path.join("elsewhere/.berth").exists());

    // A driver that was not told cannot change what another has limited.
    let volume = disk.backend(scratch.path(), "4.2").await;
    let volume = volume.create_volume(new_volume("pvc-2", 16, MANY, disk.class("4.2"))).await.unwrap();
    let unconfigured = Nfs::start(config(scratch.path())).await.unwrap();
    let range = CapacityRange::new(32 << 20, 0).unwrap();
    let grown = unconfigured.expand_volume(&volume.id, range).await;
    let Err(Error::Precondition(sentence)) = grown else { panic!("{grown:?}") };
    assert!(sentence.contains("--export-root"), "{sentence}");
}

//! Images from layouts and archives that the tests make themselves.

use std::fs;
use std::io::Write as _;

use berth_host::archive::{EntryKind, Header, encode, end, padding};
use berth_testkit::oci::{OciLayout, TAR, TAR_GZIP};
use flate2::write::GzEncoder;
use serde_json::json;
use tempfile::TempDir;

use super::*;

fn header(path: &str, size: usize) -> Header {
    Header {
        path: path.into(),
        kind: EntryKind::File,
        mode: 0o755,
        uid: 0,
        gid: 0,
        size: size.try_into().unwrap(),
        modified: (0, 0),
        device: (0, 0),
        link: Vec::new(),
        xattrs: Vec::new(),
        pieces: None,
    }
}

fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (path, data) in files {
        let header = header(path, data.len());
        bytes.extend(encode(&header));
        bytes.extend(*data);
        bytes.extend(vec![0; padding(header.size)]);
    }
    bytes.extend(end());
    bytes
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

struct Bed {
    dir: TempDir,
    layout: OciLayout,
    images: Images,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let layout = OciLayout::new(dir.path().join("layout"));
        let images = Images::new(dir.path().join("unpacked"), dir.path().join("sources"));
        Self { dir, layout, images }
    }

    fn add(&mut self, tag: &str, text: &str) -> String {
        let layer = self.layout.add_blob(TAR, &tar(&[("file", text.as_bytes())]));
        self.layout.add_image(tag, &[layer])
    }

    fn reference(&self, tag: &str) -> String {
        format!("oci:{}:{tag}", self.layout.path().display())
    }

    /// Packs the layout into an archive, as `tar` does.
    fn archive(&self, name: &str) -> PathBuf {
        let mut files = Vec::new();
        for path in ["oci-layout", "index.json"] {
            files.push((path.to_owned(), fs::read(self.layout.path().join(path)).unwrap()));
        }
        for blob in fs::read_dir(self.layout.path().join("blobs/sha256")).unwrap() {
            let blob = blob.unwrap();
            let name = format!("./blobs/sha256/{}", blob.file_name().to_string_lossy());
            files.push((name, fs::read(blob.path()).unwrap()));
        }
        let files: Vec<(&str, &[u8])> =
            files.iter().map(|(path, data)| (path.as_str(), data.as_slice())).collect();
        let archive = if name.ends_with("gz") { gzip(&tar(&files)) } else { tar(&files) };
        let path = self.dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, archive).unwrap();
        path
    }

    async fn read(
        &self,
        reference: &str,
        policy: PullPolicy,
        user: &str,
    ) -> std::result::Result<String, String> {
        let image = self.images.acquire(reference, policy, user).await.map_err(|error| error.sentence())?;
        Ok(fs::read_to_string(image.root.join("file")).unwrap())
    }

    fn unpacked(&self) -> usize {
        fs::read_dir(self.dir.path().join("unpacked"))
            .unwrap()
            .flatten()
            .filter(|entry| entry.file_name() != INCOMING)
            .count()
    }
}

#[tokio::test]
async fn layouts_and_archives_have_images_by_tag_and_by_name() {
    let mut bed = Bed::new();
    let lower =
        bed.layout.add_blob(TAR_GZIP, &gzip(&tar(&[("file", b"below"), ("gone", b"x"), ("kept", b"y")])));
    let upper = bed.layout.add_blob(TAR, &tar(&[("file", b"above"), (".wh.gone", b"")]));
    let artifact = bed.layout.add_blob("application/vnd.example.model", b"weights");
    let mut artifact = artifact;
    artifact["annotations"] = json!({"org.opencontainers.image.title": "model.bin"});
    let digest = bed.layout.add_image("1.0", &[lower, upper, artifact]);
    bed.add("registry.example/app:2", "named");
    let image = bed.images.acquire(&bed.reference("1.0"), PullPolicy::Always, "a").await.unwrap();
    assert_eq!(image.digest, digest.replace(':', "-"));
    assert_eq!(fs::read_to_string(image.root.join("file")).unwrap(), "above");
    assert_eq!(fs::read_to_string(image.root.join("model.bin")).unwrap(), "weights");
    assert!(image.root.join("kept").exists() && !image.root.join("gone").exists());

    for name in ["images.tar", "images.tar.gz"] {
        let archive = bed.archive(name);
        let reference = format!("oci-archive:{}:1.0", archive.display());
        assert_eq!(bed.read(&reference, PullPolicy::Always, "b").await.unwrap(), "above", "{name}");
    }
    let error = bed.read("registry.example/app:2", PullPolicy::Never, "c").await.unwrap_err();
    assert!(
        error.contains("this node pulls no images") && error.contains("registry.example/app:2"),
        "{error}"
    );
    bed.archive("sources/some.tar");
    assert_eq!(bed.read("registry.example/app:2", PullPolicy::Never, "c").await.unwrap(), "named");
    assert_eq!(bed.unpacked(), 2, "what came by several ways is there once");

    let error = bed.read(&bed.reference("3.0"), PullPolicy::Always, "d").await.unwrap_err();
    assert!(error.contains("no image with the tag \"3.0\"") && error.contains("\"1.0\""), "{error}");
    let whole = format!("oci:{}", bed.layout.path().display());
    let error = bed.read(&whole, PullPolicy::Always, "d").await.unwrap_err();
    assert!(error.contains("names no tag"), "{error}");
}

#[tokio::test]
async fn an_image_for_several_platforms_is_that_of_this_machine() {
    let mut bed = Bed::new();
    let (ours, other) = (bed.add("ours", "ours"), bed.add("other", "other"));
    let architecture = if cfg!(target_arch = "x86_64") { "linux/amd64" } else { "linux/arm64" };
    bed.layout.add_index("both", &[("linux/s390x", &other), (architecture, &ours)]);
    assert_eq!(bed.read(&bed.reference("both"), PullPolicy::Always, "a").await.unwrap(), "ours");
    bed.layout.add_index("foreign", &[("linux/s390x", &other)]);
    let error = bed.read(&bed.reference("foreign"), PullPolicy::Always, "a").await.unwrap_err();
    assert!(error.contains("it is not made for linux/"), "{error}");
}

#[tokio::test]
async fn a_blob_that_is_damaged_is_never_seen() {
    let mut bed = Bed::new();
    let layer = bed.layout.add_blob(TAR, &tar(&[("file", b"right")]));
    let path = bed.layout.blob_path(layer["digest"].as_str().unwrap());
    let manifest = bed.layout.add_image("1", &[layer]);
    let (good, manifest) = (fs::read(&path).unwrap(), bed.layout.blob_path(&manifest));
    let wrong = tar(&[("file", b"wrong")]);
    let longer = [good.clone(), vec![0]].concat();
    for (path, bytes) in
        [(&path, &wrong), (&path, &longer), (&path, &good[..512].to_vec()), (&manifest, &b"{}".to_vec())]
    {
        let before = fs::read(path).unwrap();
        fs::write(path, bytes).unwrap();
        let error = bed.read(&bed.reference("1"), PullPolicy::Always, "a").await.unwrap_err();
        assert!(error.contains("the blob is damaged"), "{error}");
        assert_eq!(bed.unpacked(), 0);
        fs::write(path, before).unwrap();
    }
    let none = bed.layout.add_blob("application/vnd.oci.image.layer.v1.tar+zstd", b"x");
    bed.layout.add_image("zstd", &[none]);
    let error = bed.read(&bed.reference("zstd"), PullPolicy::Always, "a").await.unwrap_err();
    assert!(error.contains("zstd, which is not supported"), "{error}");
    assert_eq!(bed.read(&bed.reference("1"), PullPolicy::Always, "a").await.unwrap(), "right");
    let left: Vec<_> = fs::read_dir(bed.dir.path().join("unpacked/incoming")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn a_policy_says_when_a_reference_is_followed_again() {
    let mut bed = Bed::new();
    bed.add("latest", "old");
    let reference = bed.reference("latest");
    assert_eq!(bed.read(&reference, PullPolicy::IfNotPresent, "a").await.unwrap(), "old");
    let digest = bed.images.acquire(&reference, PullPolicy::IfNotPresent, "a").await.unwrap().digest;
    bed.add("latest", "new");
    assert_eq!(bed.read(&reference, PullPolicy::IfNotPresent, "b").await.unwrap(), "old");
    assert_eq!(bed.read(&reference, PullPolicy::Never, "c").await.unwrap(), "old");
    assert_eq!(bed.read(&reference, PullPolicy::Always, "d").await.unwrap(), "new");
    assert_eq!(
        bed.read(&reference, PullPolicy::IfNotPresent, "e").await.unwrap(),
        "new",
        "the latest counts"
    );
    let kept = bed.images.acquire_again(&digest, "f").await.unwrap().unwrap();
    assert_eq!(fs::read_to_string(kept.root.join("file")).unwrap(), "old");
    assert_eq!(bed.images.acquire_again("sha256-none", "f").await.unwrap(), None);
}

#[tokio::test]
async fn an_image_goes_with_its_last_user() {
    let mut bed = Bed::new();
    bed.add("1", "text");
    let reference = bed.reference("1");
    let digest = bed.images.acquire(&reference, PullPolicy::Always, "uid-1~a").await.unwrap().digest;
    bed.read(&reference, PullPolicy::Always, "uid-2~a").await.unwrap();
    bed.images.release(&digest, "uid-1~a").await.unwrap();
    bed.images.release(&digest, "uid-1~a").await.unwrap();
    assert_eq!(bed.unpacked(), 1);
    bed.images.release(&digest, "uid-2~a").await.unwrap();
    assert_eq!(bed.unpacked(), 0);

    // After a crash: what was not complete goes, and what belongs to pods that are gone.
    bed.read(&reference, PullPolicy::Always, "uid-1~a").await.unwrap();
    bed.add("2", "other");
    bed.read(&bed.reference("2"), PullPolicy::Always, "uid-2~a").await.unwrap();
    fs::create_dir_all(bed.dir.path().join("unpacked/incoming/7/half")).unwrap();
    let again = Images::new(bed.dir.path().join("unpacked"), bed.dir.path().join("sources"));
    again.recover(|user| user == "uid-1~a").unwrap();
    assert_eq!(bed.unpacked(), 1);
    let incoming = bed.dir.path().join("unpacked/incoming");
    assert!(!incoming.exists() || fs::read_dir(incoming).unwrap().next().is_none());
}

#[tokio::test]
async fn many_pods_unpack_an_image_once() {
    let mut bed = Bed::new();
    bed.add("1", "text");
    let reference = bed.reference("1");
    let users: Vec<String> = (0..16).map(|number| format!("user-{number}")).collect();
    let all = users.iter().map(|user| bed.images.acquire(&reference, PullPolicy::Always, user));
    let all = futures_util::future::try_join_all(all).await.unwrap();
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    let released = users.iter().map(|user| bed.images.release(&all[0].digest, user));
    futures_util::future::try_join_all(released).await.unwrap();
    assert_eq!(bed.unpacked(), 0);
}

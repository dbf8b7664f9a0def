//! OCI image layouts that a test makes itself.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// The type of a layer that is a tar archive.
pub const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
/// The type of a layer that is a compressed tar archive.
pub const TAR_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A layout in a directory, to which images are added.
#[derive(Debug)]
pub struct OciLayout {
    directory: PathBuf,
    manifests: Vec<Value>,
}

impl OciLayout {
    /// An empty layout in a new directory.
    pub fn new(directory: PathBuf) -> Self {
        fs::create_dir_all(directory.join("blobs/sha256")).unwrap();
        fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).unwrap();
        let layout = Self { directory, manifests: Vec::new() };
        layout.write_index();
        layout
    }

    /// The directory or file that holds the image.
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// The file of a blob.
    pub fn blob_path(&self, digest: &str) -> PathBuf {
        self.directory.join("blobs").join(digest.replace(':', "/"))
    }

    /// Adds a blob; returns its descriptor.
    pub fn add_blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let mut digest = "sha256:".to_owned();
        for byte in Sha256::digest(bytes) {
            let _ = write!(digest, "{byte:02x}");
        }
        fs::write(self.blob_path(&digest), bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    }

    /// Adds an image of these layers under a name, in the place of another of that name; returns its digest.
    pub fn add_image(&mut self, name: &str, layers: &[Value]) -> String {
        let config = self.add_blob("application/vnd.oci.image.config.v1+json", b"{}");
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        let media_type = "application/vnd.oci.image.manifest.v1+json";
        let descriptor = self.add_blob(media_type, manifest.to_string().as_bytes());
        self.add_manifest(name, descriptor)
    }

    /// Adds images for several platforms, such as `linux/amd64`, under one name; returns the digest of their index.
    pub fn add_index(&mut self, name: &str, images: &[(&str, &str)]) -> String {
        let of_platform = |(platform, digest): &(&str, &str)| {
            let (os, architecture) = platform.split_once('/').unwrap();
            let size = fs::metadata(self.blob_path(digest)).unwrap().len();
            json!({"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": size,
                   "platform": {"os": os, "architecture": architecture}})
        };
        let manifests: Vec<Value> = images.iter().map(of_platform).collect();
        let index = json!({"schemaVersion": 2, "manifests": manifests});
        let descriptor =
            self.add_blob("application/vnd.oci.image.index.v1+json", index.to_string().as_bytes());
        self.add_manifest(name, descriptor)
    }

    fn add_manifest(&mut self, name: &str, mut descriptor: Value) -> String {
        let digest = descriptor["digest"].as_str().unwrap().to_owned();
        descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": name});
        self.manifests.retain(|known| known["annotations"] != descriptor["annotations"]);
        self.manifests.push(descriptor);
        self.write_index();
        digest
    }

    fn write_index(&self) {
        let index = json!({"schemaVersion": 2, "manifests": self.manifests});
        fs::write(self.directory.join("index.json"), index.to_string()).unwrap();
    }
}

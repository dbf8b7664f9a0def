//! OCI image layouts, as directories and in archives: which image a reference means, and its files.
//!
//! Every blob is compared with its digest and its size before what it says counts.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use berth_core::hex;
use berth_host::archive::{Decoder, EntryKind, Event, unpack_layer};
use berth_host::path::Dir;
use flate2::read::MultiGzDecoder;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

use super::Incoming;

/// Longer documents make no sense.
const LONGEST_DOCUMENT: u64 = 8 << 20;
const CHUNK: usize = 256 << 10;
const INDEX: &str = "index.json";
/// The names by which tools note the name of an image in an index.
const NAMES: [&str; 2] = ["io.containerd.image.name", "org.opencontainers.image.ref.name"];
/// The name of a file that is a layer by itself, as in artifacts.
const TITLE: &str = "org.opencontainers.image.title";
const GZIP: [u8; 2] = [0x1f, 0x8b];

type Result<T> = std::result::Result<T, String>;

/// What a volume's `reference` means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reference {
    /// `oci:PATH[:TAG]` names a directory with an OCI layout.
    Layout(PathBuf, Option<String>),
    /// `oci-archive:PATH[:TAG]`: a tar archive of a layout.
    Archive(PathBuf, Option<String>),
    /// A name, such as `registry.example/app:1.2`, in its long form.
    Name(String),
}

impl Reference {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let at_path = |rest: &str| {
            let (path, tag) = match rest.rsplit_once(':') {
                Some((path, tag)) if !tag.contains('/') => (path, Some(tag.to_owned())),
                _ => (rest, None),
            };
            if !Path::new(path).is_absolute() {
                return Err(format!("{path:?} is no absolute path"));
            }
            Ok((PathBuf::from(path), tag.filter(|tag| !tag.is_empty())))
        };
        if let Some(rest) = text.strip_prefix("oci:") {
            return at_path(rest).map(|(path, tag)| Self::Layout(path, tag));
        }
        if let Some(rest) = text.strip_prefix("oci-archive:") {
            return at_path(rest).map(|(path, tag)| Self::Archive(path, tag));
        }
        Ok(Self::Name(long_name(text)))
    }
}

/// A name with its registry, its repository and its tag, as Docker completes it.
fn long_name(name: &str) -> String {
    let (first, rest) = name.split_once('/').unwrap_or(("", name));
    let is_registry = first.contains(['.', ':']) || first == "localhost";
    let full = match (first, is_registry) {
        ("", _) => format!("docker.io/library/{rest}"),
        (_, true) => name.to_owned(),
        (_, false) => format!("docker.io/{name}"),
    };
    let last = full.rsplit('/').next().unwrap_or_default();
    if last.contains([':', '@']) { full } else { format!("{full}:latest") }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
    platform: Option<Platform>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

#[derive(Debug, Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct Manifest {
    #[serde(default)]
    layers: Vec<Descriptor>,
}

/// An image that was found, and where its blobs are.
#[derive(Debug)]
pub(super) struct Image {
    layout: PathBuf,
    manifest: Descriptor,
}

impl Image {
    /// Finds the image that a reference means. Archives are unpacked below `incoming`.
    pub(super) fn find(reference: &Reference, sources: &Path, incoming: &Incoming) -> Result<Self> {
        match reference {
            Reference::Layout(path, tag) => Self::in_layout(path, &ImageSelector::Tag(tag.as_deref())),
            Reference::Archive(path, tag) => {
                let layout = incoming.path().join("archive");
                extract(path, &layout, |_| true)?;
                Self::in_layout(&layout, &ImageSelector::Tag(tag.as_deref()))
            }
            Reference::Name(name) => Self::by_name(name, sources, incoming),
        }
    }

    fn by_name(name: &str, sources: &Path, incoming: &Incoming) -> Result<Self> {
        let entries = match std::fs::read_dir(sources) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            entries => Some(entries.map_err(|error| format!("list {}: {error}", sources.display()))?),
        };
        let mut paths: Vec<PathBuf> =
            entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for (number, path) in paths.iter().enumerate() {
            let found = if path.is_dir() {
                Self::in_layout(path, &ImageSelector::Name(name))
            } else {
                let layout = incoming.path().join(format!("archive-{number}"));
                extract(path, &layout, |name| name == INDEX)
                    .and_then(|()| Self::choose(&layout, &ImageSelector::Name(name)))
                    .and_then(|_| extract(path, &layout, |name| name != INDEX))
                    .and_then(|()| Self::in_layout(&layout, &ImageSelector::Name(name)))
            };
            match found {
                Ok(image) => return Ok(image),
                Err(why) => tracing::debug!(path = %path.display(), why, "not the image that is looked for"),
            }
        }
        Err(format!(
            "this node pulls no images, and no OCI layout or archive in {} has one named {name}; put one there, or name it \
             by its path: oci:/PATH:TAG or oci-archive:/PATH:TAG",
            sources.display()
        ))
    }

    /// Chooses among the images of a layout, and of those for several platforms the one for this machine.
    fn in_layout(layout: &Path, wanted: &ImageSelector<'_>) -> Result<Self> {
        let mut manifest = Self::choose(layout, wanted)?;
        for _ in 0..4 {
            if !is_index(&manifest.media_type) {
                return Ok(Self { layout: layout.to_owned(), manifest });
            }
            let index: Index = document(layout, &manifest)?;
            let platform = format!("linux/{}", architecture());
            let fits = |one: &&Descriptor| {
                one.platform.as_ref().is_none_or(|it| it.os == "linux" && it.architecture == architecture())
            };
            manifest = index
                .manifests
                .iter()
                .find(fits)
                .cloned()
                .ok_or_else(|| format!("it is not made for {platform}"))?;
        }
        Err("its indexes have no end".to_owned())
    }

    fn choose(layout: &Path, wanted: &ImageSelector<'_>) -> Result<Descriptor> {
        let index = layout.join(INDEX);
        let file = File::open(&index).map_err(|error| format!("read {}: {error}", index.display()))?;
        let mut text = Vec::new();
        file.take(LONGEST_DOCUMENT).read_to_end(&mut text).map_err(|error| error.to_string())?;
        let index: Index = serde_json::from_slice(&text)
            .map_err(|error| format!("{} is no OCI index: {error}", index.display()))?;
        let chosen = match wanted {
            ImageSelector::Tag(None) if index.manifests.len() == 1 => index.manifests.first(),
            _ => index.manifests.iter().find(|manifest| wanted.is(manifest)),
        };
        let names: Vec<&str> = index.manifests.iter().flat_map(names).collect();
        chosen.cloned().ok_or_else(|| format!("there is no {wanted} in the layout, which has {names:?}"))
    }

    pub(super) fn digest(&self) -> &str {
        &self.manifest.digest
    }

    /// Unpacks all layers, the lowest first, after their digests were compared.
    pub(super) fn unpack(&self, root: &Dir) -> Result<()> {
        let manifest: Manifest = document(&self.layout, &self.manifest)?;
        for layer in &manifest.layers {
            let unpacked = match (compression(&layer.media_type), layer.annotations.get(TITLE)) {
                (Some(Compression::None), _) => blob(&self.layout, layer)?
                    .read_all(|blob| unpack_layer(root, blob).map_err(|error| error.sentence())),
                (Some(Compression::Gzip), _) => blob(&self.layout, layer)?.read_all(|blob| {
                    unpack_layer(root, &mut MultiGzDecoder::new(blob)).map_err(|error| error.sentence())
                }),
                (Some(Compression::Zstd), _) => {
                    Err("it is compressed by zstd, which is not supported".to_owned())
                }
                (None, Some(title)) => {
                    blob(&self.layout, layer)?.read_all(|blob| write_file(root, title, blob))
                }
                (None, None) => Err(format!("its type {:?} is not known", layer.media_type)),
            };
            unpacked.map_err(|why| format!("layer {}: {why}", layer.digest))?;
        }
        Ok(())
    }
}

/// Which image of a layout is meant.
enum ImageSelector<'a> {
    Tag(Option<&'a str>),
    Name(&'a str),
}

impl ImageSelector<'_> {
    fn is(&self, manifest: &Descriptor) -> bool {
        match self {
            Self::Tag(tag) => {
                names(manifest).any(|name| Some(name) == *tag) || *tag == Some(&manifest.digest)
            }
            Self::Name(wanted) => match wanted.split_once('@') {
                Some((_, digest)) => manifest.digest == digest,
                None => names(manifest).any(|name| name.contains(['/', ':']) && long_name(name) == *wanted),
            },
        }
    }
}

impl fmt::Display for ImageSelector<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(Some(tag)) => write!(f, "image with the tag {tag:?}"),
            Self::Tag(None) => f.write_str("single image, and the reference names no tag"),
            Self::Name(name) => write!(f, "image named {name}"),
        }
    }
}

fn names(manifest: &Descriptor) -> impl Iterator<Item = &str> {
    NAMES.into_iter().filter_map(|name| manifest.annotations.get(name)).map(String::as_str)
}

fn is_index(media_type: &str) -> bool {
    media_type.contains("image.index") || media_type.contains("manifest.list")
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
}

/// How a layer of files is compressed; `None` for what is no layer of files.
fn compression(media_type: &str) -> Option<Compression> {
    let is_layer = media_type.contains(".layer.")
        || media_type.contains("rootfs.diff")
        || media_type.contains("rootfs.foreign");
    let (_, form) = media_type.rsplit_once(".tar")?;
    match form {
        _ if !is_layer => None,
        "" => Some(Compression::None),
        "+gzip" | ".gzip" => Some(Compression::Gzip),
        "+zstd" | ".zstd" => Some(Compression::Zstd),
        _ => None,
    }
}

/// A blob while it is read.
struct Blob {
    file: io::Take<File>,
    sum: Sha256,
    length: u64,
    digest: String,
    size: u64,
}

impl Read for Blob {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.file.read(buffer)?;
        self.sum.update(&buffer[..length]);
        self.length += u64::try_from(length).unwrap_or(u64::MAX);
        Ok(length)
    }
}

impl Blob {
    /// Has `read` read the blob, and compares its digest and size.
    fn read_all<T>(mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let taken = read(&mut self);
        io::copy(&mut self, &mut io::sink()).map_err(|error| error.to_string())?;
        let found = format!("sha256:{}", hex(&self.sum.finalize()));
        if found != self.digest || self.length != self.size {
            return Err(format!("the blob is damaged: it has the digest {found} and {} bytes", self.length));
        }
        taken
    }
}

fn blob(layout: &Path, descriptor: &Descriptor) -> Result<Blob> {
    let Some(sum) = descriptor.digest.strip_prefix("sha256:").filter(|sum| is_sum(sum)) else {
        return Err(format!("the digest {:?} is none of sha256", descriptor.digest));
    };
    let path = layout.join("blobs/sha256").join(sum);
    let file = File::open(&path).map_err(|error| format!("open {}: {error}", path.display()))?;
    let (digest, size) = (descriptor.digest.clone(), descriptor.size);
    // One more byte shows that it is longer than it should be.
    let file = file.take(size.saturating_add(1));
    Ok(Blob { file, sum: Sha256::new(), length: 0, digest, size })
}

fn is_sum(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn document<T: DeserializeOwned>(layout: &Path, descriptor: &Descriptor) -> Result<T> {
    if descriptor.size > LONGEST_DOCUMENT {
        return Err(format!("{} has {} bytes, too many for a manifest", descriptor.digest, descriptor.size));
    }
    let text = blob(layout, descriptor)?.read_all(|blob| {
        let mut text = Vec::new();
        blob.read_to_end(&mut text).map_err(|error| error.to_string())?;
        Ok(text)
    });
    let text = text.map_err(|why| format!("{}: {why}", descriptor.digest))?;
    serde_json::from_slice(&text).map_err(|error| format!("{} is no manifest: {error}", descriptor.digest))
}

/// Writes a file of an artifact.
fn write_file(root: &Dir, title: &str, content: &mut Blob) -> Result<()> {
    let mut file = root.create_file(title, 0o644).map_err(|error| error.sentence())?;
    io::copy(content, &mut file).map(drop).map_err(|error| format!("write {title:?}: {error}"))
}

/// Takes the files of a layout out of an archive, as far as they are `wanted`; one that is there already stays.
fn extract(archive: &Path, layout: &Path, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let failed = |error: io::Error| format!("read {}: {error}", archive.display());
    let mut file = File::open(archive).map_err(failed)?;
    let mut begin = [0; 2];
    let is_compressed = file.read_exact(&mut begin).is_ok() && begin == GZIP;
    let file = File::open(archive).map_err(failed)?;
    let mut reader: Box<dyn Read> =
        if is_compressed { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
    let blobs = Dir::ensure(&layout.join("blobs/sha256"), 0o700).map_err(|error| error.sentence())?;
    let top = Dir::open(layout).map_err(|error| error.sentence())?;
    let (mut decoder, mut chunk, mut open) = (Decoder::default(), vec![0; CHUNK], None);
    loop {
        let length = reader.read(&mut chunk).map_err(failed)?;
        decoder.push(&chunk[..length]);
        while let Some(event) = decoder.next_event().map_err(|damaged| failed(io::Error::other(damaged)))? {
            match event {
                Event::Entry(header) if header.kind == EntryKind::File => {
                    let path = String::from_utf8_lossy(&header.path).into_owned();
                    let path = path.trim_start_matches("./");
                    let place = match path.strip_prefix("blobs/sha256/") {
                        Some(sum) if is_sum(sum) => Some((&blobs, sum)),
                        None if path == INDEX => Some((&top, path)),
                        _ => None,
                    };
                    open = match place.filter(|(_, name)| wanted(name)) {
                        Some((directory, name)) => {
                            Some(directory.create_file(name, 0o600).map_err(|error| error.sentence())?)
                        }
                        None => None,
                    };
                }
                Event::Entry(_) | Event::EntryEnd => open = None,
                Event::Data(offset, bytes) => {
                    if let Some(file) = &open {
                        use std::os::unix::fs::FileExt as _;
                        file.write_all_at(&bytes, offset).map_err(failed)?;
                    }
                }
            }
        }
        if length == 0 {
            break;
        }
    }
    if decoder.is_complete() { Ok(()) } else { Err(failed(io::Error::other("it is no whole tar archive"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_paths_or_names() {
        let layout = |path: &str, tag: Option<&str>| Reference::Layout(path.into(), tag.map(str::to_owned));
        for (text, expected) in [
            ("oci:/srv/app", layout("/srv/app", None)),
            ("oci:/srv/app:1.2", layout("/srv/app", Some("1.2"))),
            ("oci:/srv/a:b/app", layout("/srv/a:b/app", None)),
            ("oci-archive:/srv/app.tar:1", Reference::Archive("/srv/app.tar".into(), Some("1".into()))),
            ("busybox", Reference::Name("docker.io/library/busybox:latest".into())),
            ("team/app:2", Reference::Name("docker.io/team/app:2".into())),
            ("localhost/app", Reference::Name("localhost/app:latest".into())),
            ("quay.io/crio/artifact:v1", Reference::Name("quay.io/crio/artifact:v1".into())),
            ("host:5000/app", Reference::Name("host:5000/app:latest".into())),
        ] {
            assert_eq!(Reference::parse(text).unwrap(), expected, "{text}");
        }
        assert!(Reference::parse("oci:relative").unwrap_err().contains("no absolute path"));
    }

    #[test]
    fn layers_are_known_by_their_types() {
        for (media_type, expected) in [
            ("application/vnd.oci.image.layer.v1.tar", Some(Compression::None)),
            ("application/vnd.oci.image.layer.v1.tar+gzip", Some(Compression::Gzip)),
            ("application/vnd.docker.image.rootfs.diff.tar.gzip", Some(Compression::Gzip)),
            ("application/vnd.oci.image.layer.v1.tar+zstd", Some(Compression::Zstd)),
            ("application/vnd.cncf.model.weight.v1.raw", None),
            ("text/plain", None),
        ] {
            assert_eq!(compression(media_type), expected, "{media_type}");
        }
    }
}

//! Directories that live as long as their pod has them: on the node's disk, or in its memory.

use std::io;
use std::path::{Path, PathBuf};

use berth_core::names::EMPTY_DIR_PLUGIN;
use berth_host::mount::{self, Attributes};
use berth_host::path::Dir;
use berth_host::{Error, Result};

use crate::layout::Layout;

/// Of all that lies between the node's directory and a volume.
const PARENTS: u32 = 0o750;

/// Where the content of a directory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Medium {
    /// On the node's disk.
    Disk,
    /// In the node's memory, up to a size.
    Memory {
        /// In bytes; none leaves it to the kernel (half of the memory).
        size: Option<u64>,
    },
    /// In huge pages of the node's memory.
    HugePages {
        /// The size of a page in bytes.
        page_size: u64,
    },
}

/// One volume's directory in a pod's.
pub(super) struct Scratch<'a> {
    layout: &'a Layout,
    plugin: &'a str,
    pod_uid: &'a str,
    name: &'a str,
}

impl<'a> Scratch<'a> {
    /// The directory of a plugin's volume; refused where the pod's uid could lead elsewhere.
    pub(super) fn new(layout: &'a Layout, plugin: &'a str, pod_uid: &'a str, name: &'a str) -> Result<Self> {
        for part in [pod_uid, name] {
            if matches!(part, "" | "." | "..") || part.contains(['/', '\0']) {
                let doing = format!("use {part:?} as the name of a directory");
                return Err(Error::new(doing, io::Error::from(io::ErrorKind::InvalidInput)));
            }
        }
        Ok(Self { layout, plugin, pod_uid, name })
    }

    /// Returns the path of the directory, whether or not it exists.
    pub(super) fn path(&self) -> PathBuf {
        self.layout.pod_volume(self.pod_uid, self.plugin, self.name)
    }

    /// Opens it if it was marked as ready and is still there.
    pub(super) fn open_ready(&self, medium: Medium) -> Result<Option<Dir>> {
        let marked = exists(&self.marker().join("ready"))?;
        let lost = medium != Medium::Disk && !mount::is_mount_point(&self.path())?;
        if marked && !lost { open(&self.path()) } else { Ok(None) }
    }

    /// Makes it, open to everybody; one that is there keeps its content. In memory it is as `/tmp`, where files can
    /// be removed by their owners only.
    pub(super) fn make(&self, medium: Medium) -> Result<Dir> {
        let parent = Dir::ensure(&self.layout.pod_volumes(self.pod_uid, self.plugin), PARENTS)?;
        let directory = parent.ensure_dir(self.name, PARENTS)?;
        match medium {
            Medium::Disk => {
                directory.set_mode(0o777)?;
                Ok(directory)
            }
            Medium::Memory { size } => {
                if !mount::is_mount_point(&self.path())? {
                    self.mount(size)?;
                }
                parent.dir(self.name)
            }
            Medium::HugePages { page_size } => {
                if !mount::is_mount_point(&self.path())? {
                    let attributes = Attributes { nodev: true, ..Attributes::default() };
                    let options = [format!("pagesize={page_size}"), "mode=0777".to_owned()];
                    mount::filesystem("nodev".as_ref(), &self.path(), "hugetlbfs", attributes, &options)?;
                }
                parent.dir(self.name)
            }
        }
    }

    /// Marks it as ready: from here on it is the pod's, and nobody else's to change.
    pub(super) fn mark_ready(&self) -> Result<()> {
        let directory = Dir::ensure(&self.marker(), PARENTS)?;
        match directory.create_file("ready", 0o644) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.map(drop),
        }
    }

    /// Removes it and its marker, whatever of them is there.
    pub(super) fn remove(&self) -> Result<()> {
        if let Some(marker) = open(&self.marker())? {
            marker.remove_file("ready")?;
            remove_if_empty(&self.marker())?;
        }
        let Some(parent) = open(&self.layout.pod_volumes(self.pod_uid, self.plugin))? else {
            return Ok(());
        };
        let path = self.path();
        let take_away = || mount::unmount(&path).and_then(|_| parent.remove_tree(self.name));
        if let Err(error) = take_away() {
            // What somebody mounted in it would keep it, and its pod, for ever.
            if mount::unmount_below(&path)? == 0 {
                return Err(error);
            }
            take_away()?;
        }
        Ok(())
    }

    fn mount(&self, size: Option<u64>) -> Result<()> {
        let mut options: Vec<String> = size.map(|size| format!("size={size}")).into_iter().collect();
        options.push("noswap".to_owned());
        let attach = |options: &[String]| {
            mount::filesystem("tmpfs".as_ref(), &self.path(), "tmpfs", Attributes::default(), options)
        };
        // Kernels before 6.4 do not know `noswap`.
        attach(&options).or_else(|_| attach(&options[..options.len() - 1]))
    }

    /// The kubelet makes every such directory through emptyDir, and keeps the marker there.
    fn marker(&self) -> PathBuf {
        let name = if self.plugin == EMPTY_DIR_PLUGIN {
            self.name.to_owned()
        } else {
            format!("wrapped_{}", self.name)
        };
        self.layout.pod_plugin(self.pod_uid, EMPTY_DIR_PLUGIN, &name)
    }
}

fn open(path: &Path) -> Result<Option<Dir>> {
    match Dir::open(path) {
        Ok(dir) => Ok(Some(dir)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn remove_if_empty(path: &Path) -> Result<()> {
    match std::fs::remove_dir(path) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {
            Err(Error::new(format!("remove {}", path.display()), error))
        }
        _ => Ok(()),
    }
}

fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(|error| Error::new(format!("search {}", path.display()), error))
}

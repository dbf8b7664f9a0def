//! Volumes that are each mounted by themselves, for a program that ends after each call: it has no memory in which it
//! could count who uses a share.
//!
//! The share is mounted at a directory of the driver's own that is named after the target, bound from there at the target
//! with the attributes asked for, and unmounted where it was mounted first. A call that was killed in between leaves a mount
//! of that name, which the next call for the same target takes away.

use std::path::{Path, PathBuf};

use berth_core::{Access, AccessKind, hex};
use berth_host::{
    mount::{Attributes, parse_options},
    remote,
};
use berth_nfs::Metrics;
use sha2::{Digest as _, Sha256};

use super::{
    AllowedServers, Config, blocking,
    mount::{Mounter, refused_by},
    parameters::{ShareSubdirectory, VolumeKind, check_secret_options, secret_options},
    shares::{LOOKUP, PROBE_TIMEOUT, UNMOUNT, is_stale},
};
use crate::{Context, Error, NodeVolume, Result};

/// Mounts directories of NFS shares, each by itself.
#[derive(Debug)]
pub struct DirectMounts {
    mounter: Mounter,
    default_options: Vec<String>,
    allowed: AllowedServers,
    permissions: Option<u32>,
    dir: PathBuf,
}

impl DirectMounts {
    /// As the configuration says; of the directory for mounts nothing is used but what this type made.
    pub fn new(config: &Config) -> Self {
        Self {
            mounter: Mounter::new(config, Metrics::default()),
            default_options: config.mount_options.clone(),
            allowed: config.allowed_servers.clone(),
            permissions: config.mount_permissions,
            dir: config.mount_dir.clone(),
        }
    }

    /// Mounts the volume at a target, which is an empty directory. The same volume there already is success; a mount that
    /// has lost its server's handle, or the process that serves it, is replaced.
    pub async fn mount(&self, ctx: &Context, volume: &NodeVolume, target: &Path) -> Result<()> {
        volume.check_access(AccessKind::Mount)?;
        let place = ShareSubdirectory::parse(volume.id.as_str(), &volume.context)?;
        self.allowed.check(&place.share.server)?;
        if place.kind != VolumeKind::Directory {
            return Err(Error::invalid("kind image is served by the CSI driver alone; take kind directory"));
        }
        let secret = secret_options(ctx);
        check_secret_options(&secret)?;
        let options = place.options(volume, &secret, &self.default_options);
        self.allowed.check_options(&options)?;
        if self.is_mounted(&place, target).await? {
            return Ok(());
        }
        let root = self.root_of(target);
        self.end(&root).await?;
        let mounted = match self.mounter.mount(&place.share, &options, &root).await {
            Ok(()) => self.bind(&place, volume, &root, target).await,
            failed => failed,
        };
        if mounted.is_err() {
            // The first error is the one to report; what stays mounted is taken away by the next call.
            let _ = self.end(&root).await;
            return mounted;
        }
        let remote = self.mounter.remote.clone();
        blocking(move || {
            remote.unmount(&root, UNMOUNT)?;
            let _ = std::fs::remove_dir(&root);
            Ok(())
        })
        .await
    }

    /// Takes away whatever is mounted at a target, and what a killed call left of mounting it. Containers that still have it
    /// in a mount namespace of their own keep it.
    pub async fn unmount(&self, target: &Path) -> Result<()> {
        let (remote, at) = (self.mounter.remote.clone(), target.to_owned());
        blocking(move || {
            let Some(found) = remote::mounted_at(&at)? else { return Ok(()) };
            if found.fs_type.starts_with("fuse") {
                remote.unmount_last(&at, UNMOUNT)?;
            } else {
                remote.unmount(&at, UNMOUNT)?;
            }
            Ok(())
        })
        .await?;
        let root = self.root_of(target);
        self.end(&root).await?;
        let _ = std::fs::remove_dir(&root);
        Ok(())
    }

    /// Whether the volume is at the target already, and of use.
    async fn is_mounted(&self, place: &ShareSubdirectory, target: &Path) -> Result<bool> {
        let (remote, at, share) = (self.mounter.remote.clone(), target.to_owned(), place.share.clone());
        let usable = blocking(move || {
            let Some(found) = remote::mounted_at(&at)? else { return Ok(Some(false)) };
            if found.source != share.to_string() {
                let (at, source) = (at.display(), found.source);
                return Err(Error::Precondition(format!(
                    "{source} is mounted at {at} already; unmount it first"
                )));
            }
            match remote.probe(&at, PROBE_TIMEOUT) {
                Ok(()) => Ok(Some(true)),
                Err(error) if is_stale(&error) => Ok(None),
                Err(error) => Err(refused_by(&share, &error)),
            }
        });
        match usable.await? {
            Some(usable) => Ok(usable),
            None => self.end(target).await.map(|()| false),
        }
    }

    /// Makes the volume's directory, of the share at `root`, appear at the target.
    async fn bind(
        &self,
        place: &ShareSubdirectory,
        volume: &NodeVolume,
        root: &Path,
        target: &Path,
    ) -> Result<()> {
        let flags = match &volume.capability.access {
            Access::Mount { flags, .. } => [flags.as_slice(), &place.mount_options].concat(),
            Access::Block => Vec::new(),
        };
        let attributes = parse_options(&flags).attributes;
        let read_only = attributes.read_only || volume.read_only;
        let mode = place.ownership.mode.or(self.permissions).filter(|_| !read_only);
        let below = PathBuf::from(place.dir.as_ref().map_or("", |dir| dir.as_str()));
        let (remote, share) = (self.mounter.remote.clone(), place.share.clone());
        let (root, target) = (root.to_owned(), target.to_owned());
        blocking(move || {
            let bound = mode.map_or(Ok(()), |mode| remote.ensure_mode(&root, &below, mode, LOOKUP));
            let attributes = Attributes { read_only, ..attributes };
            let bound = bound.and_then(|()| remote.bind(&root, &below, &target, attributes, LOOKUP));
            bound.map_err(|error| refused_by(&share, &error))
        })
        .await
    }

    /// Unmounts what is at a path, whatever the server says. The process behind a FUSE mount ends at once, which nobody else
    /// uses; the kernel's client may share what is under way with other mounts, so nothing is forced there.
    async fn end(&self, path: &Path) -> Result<()> {
        let (remote, path) = (self.mounter.remote.clone(), path.to_owned());
        blocking(move || {
            let Some(found) = remote::mounted_at(&path)? else { return Ok(()) };
            if found.fs_type.starts_with("fuse") {
                remote.end(&path, UNMOUNT)?;
            } else {
                remote.unmount(&path, UNMOUNT)?;
            }
            Ok(())
        })
        .await
    }

    /// Where the share of a target is mounted while it is not yet bound.
    fn root_of(&self, target: &Path) -> PathBuf {
        self.dir.join(hex(&Sha256::digest(target.as_os_str().as_encoded_bytes())[..16]))
    }
}

//! Mounts `nfs` volumes of pods for the node, as the NFS driver mounts its own: by the kernel where it has a client, else
//! through FUSE.

use std::collections::BTreeMap;
use std::path::Path;

use async_trait::async_trait;
use berth_backends::{
    Access, AccessMode, Context, NodeVolume, Secrets, VolumeCapability,
    nfs::{self, DirectMounts, MountMode},
};
use berth_core::error_chain;
use berth_node::layout::Layout;
use berth_node::{Failed, NfsMounts, NfsShare};

/// The node's NFS mounts.
pub(super) struct Mounts(DirectMounts);

impl Mounts {
    /// Mounts with these options where a volume has none.
    pub(super) fn new(layout: &Layout, default_options: &[String]) -> anyhow::Result<Self> {
        let mut config = nfs::Config::new(layout.nfs_mounts(), "node".parse()?);
        let kernel = berth_host::remote::kernel_has("nfs");
        config.mount_mode = if kernel { MountMode::Kernel } else { MountMode::Fuse };
        config.mount_options = default_options.to_vec();
        Ok(Self(DirectMounts::new(&config)))
    }
}

#[async_trait]
impl NfsMounts for Mounts {
    async fn mount(&self, share: &NfsShare, target: &Path) -> Result<(), Failed> {
        let id =
            share.name.parse().map_err(|error| Failed::unchanged(format!("the volume's name: {error}")))?;
        let context = [("server", &share.server), ("share", &share.path)];
        let volume = NodeVolume {
            id,
            capability: VolumeCapability {
                access: Access::Mount { fs_type: String::new(), flags: share.options.clone(), group: None },
                mode: AccessMode::MultiNodeMultiWriter,
            },
            read_only: share.read_only,
            context: context.map(|(key, value)| (key.to_owned(), value.clone())).into(),
            publish_context: BTreeMap::new(),
            staging: None,
        };
        let ctx = Context::new(None, Secrets::default(), &BTreeMap::new());
        self.0.mount(&ctx, &volume, target).await.map_err(|error| failed(&error))
    }

    async fn unmount(&self, target: &Path) -> Result<(), Failed> {
        self.0.unmount(target).await.map_err(|error| failed(&error))
    }
}

/// What a failure has left is not known: a mount that a server answered too late may still come.
fn failed(error: &berth_backends::Error) -> Failed {
    match error {
        berth_backends::Error::Host(error) => Failed::uncertain(error.sentence()),
        berth_backends::Error::Invalid(message) => Failed::unchanged(message.clone()),
        other => Failed::uncertain(error_chain(other)),
    }
}

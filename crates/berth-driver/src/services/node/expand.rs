//! What growing a volume on its node takes.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use berth_core::{Capacity, VolumeCapability, VolumeId};
use berth_host::mount;
use parking_lot::Mutex;
use rustix::io::Errno;

use super::bind_target;
use crate::{
    Context, Error, NodeExpanded, NodeVolume, Result, Services,
    call::node::NodeExpand,
    compose::Node,
    erased::{DynNodeExpansion, DynStaging},
    ledger::{Phase, Published, Staged},
};

/// How long a filesystem that a mount elsewhere held is left mounted before that is tried again.
const REMOUNT_AGAIN_AFTER: Duration = Duration::from_mins(5);

impl Services {
    /// Makes sure that what is on the volume has the volume's size.
    pub(super) async fn ensure_grown(
        &self,
        ctx: &Context,
        node: &Node,
        expansion: &dyn DynNodeExpansion,
        id: &VolumeId,
        call: &NodeExpand,
    ) -> Result<Capacity> {
        let _guard = self.lock_volume(id)?;
        let staged = self.ledger.staged(id);
        if let Some(capability) = &call.capability {
            node.sources.check(ctx, &again(id, capability, false, None)).await?;
        }
        let expanded = match &staged {
            // A remount that failed between unstaging and staging: this call comes to finish it.
            Some(staged) if staged.phase != Phase::Mounted => NodeExpanded::NeedsRemount,
            _ => {
                let at = staged.as_ref().map_or(call.path.as_path(), |staged| &staged.path);
                expansion.expand_on_node(ctx, id, at, call.range).await?
            }
        };
        match (expanded, &node.parts.staging, staged) {
            (NodeExpanded::Done(capacity), ..) => Ok(capacity),
            (NodeExpanded::NeedsRemount, Some(staging), Some(staged)) => {
                if staged.phase == Phase::Mounted && self.held.is_likely(id) {
                    return Err(only_unmounted());
                }
                self.remount(ctx, node, &**staging, &staged).await?;
                // A pod's own mount, in a namespace of its own, may have kept the filesystem mounted all the time; then
                // it has not grown, and an OK would have the caller record a size that the pod does not have.
                match expansion.expand_on_node(ctx, id, &staged.path, call.range).await? {
                    NodeExpanded::Done(capacity) => Ok(capacity),
                    NodeExpanded::NeedsRemount => {
                        self.held.note(id);
                        Err(only_unmounted())
                    }
                }
            }
            (NodeExpanded::NeedsRemount, ..) => Err(only_unmounted()),
        }
    }

    /// Takes the volume down on this node and brings it up again, which grows it; whoever uses it keeps it.
    async fn remount(
        &self,
        ctx: &Context,
        node: &Node,
        staging: &dyn DynStaging,
        staged: &Staged,
    ) -> Result<()> {
        self.note_staged(staged, Phase::Remounting).await?;
        let published = self.ledger.published(&staged.volume);
        let targets: Vec<PathBuf> = published.iter().map(|publication| publication.target.clone()).collect();
        if let Err(error) = self.blocking(move |_| unmount_all(&targets)).await {
            self.bind_all(ctx, node, staged, &published).await?;
            self.note_staged(staged, Phase::Mounted).await?;
            return Err(error);
        }
        let unstaged = staging.unstage(ctx, &staged.volume, &staged.path).await;
        // Whether or not it came down, it has to be up again afterwards.
        self.bring_up(ctx, node, staging, staged).await?;
        unstaged.map_err(in_use)
    }

    /// Stages the volume again and binds it wherever it was published.
    pub(super) async fn bring_up(
        &self,
        ctx: &Context,
        node: &Node,
        staging: &dyn DynStaging,
        staged: &Staged,
    ) -> Result<()> {
        let read_only = staged.capability.mode.is_read_only();
        let volume = again(&staged.volume, &staged.capability, read_only, Some(staged));
        staging.stage(ctx, &volume, &staged.path).await?;
        self.bind_all(ctx, node, staged, &self.ledger.published(&staged.volume)).await?;
        self.note_staged(staged, Phase::Mounted).await
    }

    /// Binds the volume again wherever it was published and is not any more.
    async fn bind_all(
        &self,
        ctx: &Context,
        node: &Node,
        staged: &Staged,
        published: &[Published],
    ) -> Result<()> {
        for publication in published.iter().filter(|publication| publication.phase == Phase::Mounted) {
            let (capability, read_only) = (&publication.capability, publication.read_only);
            let volume = again(&staged.volume, capability, read_only, Some(staged));
            let source = node.sources.source(ctx, &volume).await?;
            if !node.mounts.is_mounted(&publication.target).await? {
                bind_target(&*node.mounts, &Arc::new(source), publication).await?;
            }
        }
        Ok(())
    }
}

/// Volumes that were unmounted and mounted again in vain, because a mount elsewhere held their filesystem, and when.
///
/// Callers repeat an expansion that fails. A container that starts while the volume is unmounted would get an empty directory,
/// so it is not tried again before something has changed or some time has passed.
#[derive(Default)]
pub(in crate::services) struct Held(Mutex<HashMap<VolumeId, Instant>>);

impl Held {
    fn note(&self, id: &VolumeId) {
        self.0.lock().insert(id.clone(), Instant::now());
    }

    /// Whether the filesystem is probably still held.
    fn is_likely(&self, id: &VolumeId) -> bool {
        self.0.lock().get(id).is_some_and(|since| since.elapsed() < REMOUNT_AGAIN_AFTER)
    }

    /// To be told when the volume was unpublished or unstaged: whoever held it may be gone.
    pub(super) fn forget(&self, id: &VolumeId) {
        self.0.lock().remove(id);
    }
}

/// A volume that was staged or published here before, of which no call says more than its id.
pub(super) fn again(
    id: &VolumeId,
    capability: &VolumeCapability,
    read_only: bool,
    staged: Option<&Staged>,
) -> NodeVolume {
    NodeVolume {
        id: id.clone(),
        capability: capability.clone(),
        read_only,
        context: BTreeMap::new(),
        publish_context: BTreeMap::new(),
        staging: staged.map(|staged| staged.path.clone()),
    }
}

fn unmount_all(targets: &[PathBuf]) -> Result<()> {
    for target in targets {
        mount::unmount(target).map_err(|error| in_use(error.into()))?;
    }
    Ok(())
}

fn in_use(error: Error) -> Error {
    match error {
        Error::Host(host) if host.errno() == Some(Errno::BUSY.raw_os_error()) => only_unmounted(),
        other => other,
    }
}

fn only_unmounted() -> Error {
    Error::Precondition(
        "the filesystem is in use, and this machine can grow it only while it is not mounted: growing a mounted ext4 needs \
         CAP_SYS_RESOURCE, which the driver does not have; it is grown the next time the volume is staged, after its pods on \
         this node have ended"
            .to_owned(),
    )
}

//! Inline volumes: made when their pod starts, removed when it ends, and unknown to the controller.

use std::{
    fmt::Write as _,
    io,
    path::{Path, PathBuf},
};

use berth_core::VolumeId;
use berth_host::path::Dir;
use sha2::{Digest as _, Sha256};

use crate::{
    Driver, Feature,
    backend::{Error, NewVolume, Parameters, Result, Volume},
    call::node::{Inline, Publish, inline_name},
    ledger::{Phase, Published},
    locks::{Hold, Key},
    services::rules,
};

impl Driver {
    /// Makes sure that the inline volume exists and is at the target; what fails halfway leaves no new volume.
    pub(super) async fn publish_inline(&self, call: Publish, inline: Inline) -> Result<()> {
        let _name = self.lock([(Key::VolumeName(inline.name.clone()), Hold::Exclusive)])?;
        let existing = self.backend.find_volume(&inline.name).await?;
        let is_new = existing.is_none();
        let volume = match existing {
            Some(volume) if volume.ephemeral => volume,
            Some(volume) => {
                let (name, id) = (&inline.name, volume.id);
                return Err(Error::Conflict(format!(
                    "{name:?} is the name of volume {id:?}, which is not inline"
                )));
            }
            None => self.make_inline(&call, inline).await?,
        };
        let handle = call.id.clone();
        let published = self.publish_made(&volume, call).await;
        if is_new && let Err(error) = published {
            if let Err(left) = self.remove_inline(&handle).await {
                tracing::warn!(volume.id = %volume.id, error = %left, "an inline volume stays until its pod is gone");
            }
            return Err(error);
        }
        published
    }

    async fn make_inline(&self, call: &Publish, inline: Inline) -> Result<Volume> {
        let capabilities = vec![call.capability.clone()];
        self.check_new(&inline.parameters, &Parameters::new(), &capabilities).await?;
        let new = NewVolume {
            name: inline.name,
            range: inline.range,
            capabilities,
            parameters: inline.parameters,
            mutable: Parameters::new(),
            source: None,
            ephemeral: true,
        };
        self.backend.create_volume(new).await
    }

    async fn publish_made(&self, volume: &Volume, call: Publish) -> Result<()> {
        let _guard = self.lock_volume(&volume.id)?;
        rules::check_kind(volume, call.capability.access.kind())?;
        if let Some(other) =
            self.ledger.published(&volume.id).iter().find(|other| other.target != call.target)
        {
            let (id, target) = (&call.id, other.target.display());
            return Err(Error::Precondition(format!("inline volume {id:?} is published at {target}")));
        }
        let staging = self.features.has(Feature::Stage).then(|| self.private_staging(&call.id));
        if let Some(path) = &staging {
            let made = path.clone();
            self.blocking(move |_| Ok(Dir::ensure(&made, 0o700).map(drop)?)).await?;
            self.stage(volume, path.clone(), call.capability.clone()).await?;
        }
        let wanted = Published {
            volume: volume.id.clone(),
            handle: Some(call.id),
            target: call.target,
            capability: call.capability,
            read_only: call.read_only,
            phase: Phase::Mounted,
        };
        self.publish(volume, staging.as_deref(), wanted, &call.secrets).await
    }

    /// Removes the inline volume that Kubernetes calls `handle`, if there is one and no target has it any more.
    pub(super) async fn remove_inline(&self, handle: &VolumeId) -> Result<()> {
        let Some(name) = inline_name(handle) else { return Ok(()) };
        let Some(volume) = self.backend.find_volume(&name).await? else { return Ok(()) };
        if !volume.ephemeral || !self.ledger.published(&volume.id).is_empty() {
            return Ok(());
        }
        let _guard = self.lock_volume(&volume.id)?;
        if self.features.has(Feature::Stage) {
            let path = self.private_staging(handle);
            self.unstage(&volume.id, &path).await?;
            self.blocking(move |_| remove_directory(&path)).await?;
        }
        match self.backend.delete_volume(&volume.id).await {
            Err(Error::NotFound { what: "volume", .. }) => Ok(()),
            other => other,
        }
    }

    /// Where an inline volume is staged; its id is no file name, a digest of it is.
    fn private_staging(&self, handle: &VolumeId) -> PathBuf {
        let digest = Sha256::digest(handle.as_str());
        let name = digest[..16].iter().fold(String::new(), |mut name, byte| {
            let _ = write!(name, "{byte:02x}");
            name
        });
        self.config.state_dir.join("ephemeral").join(name)
    }
}

fn remove_directory(path: &Path) -> Result<()> {
    match std::fs::remove_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let doing = format!("remove the staging directory {}", path.display());
            Err(berth_host::Error::new(doing, error).into())
        }
        _ => Ok(()),
    }
}

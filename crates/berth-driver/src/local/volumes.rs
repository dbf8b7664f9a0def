//! Volumes from the controller's side: create, delete, attach, expand, modify, list.

use std::{collections::BTreeMap, sync::Arc};

use berth_core::{
    AccessKind, Capacity, CapacityRange, Name, NodeId, VolumeCapability, VolumeId,
    names::KUBERNETES_PARAMETER_PREFIX,
};
use berth_host::{
    format::{self, Filesystem},
    loopdev,
    path::Dir,
};

use berth_journal::{self as journal, Barrier};

use super::{
    Inner,
    content::{self, Capture},
    kind::{Kind, Tuning},
    record::{AttachmentRecord, Key, SNAPSHOT, Source, VOLUME, VolumeRecord},
};
use crate::{
    backend::{
        Attachment, ContentSource, Error, Expanded, NewVolume, Page, PageRequest, Parameters, Result, Volume,
    },
    image::{choose_growth, choose_size, filesystem_asked},
};

/// Where a new volume's first content comes from, looked up.
#[derive(Debug)]
struct Origin {
    source: Source,
    key: Key,
    dir: Dir,
    kind: Kind,
    size: u64,
    filesystem: Option<Filesystem>,
}

impl Inner {
    pub(super) fn check_parameters(
        &self,
        parameters: &Parameters,
        mutable: &Parameters,
        capabilities: &[VolumeCapability],
    ) -> Result<()> {
        let access = capabilities.first().map_or(AccessKind::Mount, |capability| capability.access.kind());
        let kind = self.choose_kind(parameters, access, None)?;
        if kind == Kind::Image {
            filesystem_asked(capabilities)?;
        }
        Tuning::parse(kind, mutable, &self.tunable()).map(|_| ())
    }

    pub(super) fn find_volume(&self, name: &Name) -> Result<Option<Volume>> {
        let key = Key::of(VOLUME, name.as_str());
        let Some(record) = self.state().volume(key) else { return Ok(None) };
        if *record.name != *name.as_str() {
            return Err(Error::Conflict(format!(
                "the names {:?} and {name:?} have the same hash",
                record.name
            )));
        }
        Ok(Some(self.describe_volume(key, &record)))
    }

    pub(super) fn volume(&self, id: &VolumeId) -> Option<(Key, Arc<VolumeRecord>)> {
        let key = Key::parse(VOLUME, id.as_str())?;
        Some((key, self.state().volume(key)?))
    }

    pub(super) fn existing_volume(&self, id: &VolumeId) -> Result<(Key, Arc<VolumeRecord>)> {
        self.volume(id).ok_or_else(|| Error::no_volume(id))
    }

    /// The directory of a volume that has a record.
    pub(super) fn volume_dir(&self, key: Key) -> Result<Dir> {
        Ok(self.volumes.dir(&key.to_string())?)
    }

    pub(super) async fn create_volume(self: &Arc<Self>, new: NewVolume) -> Result<Volume> {
        let key = Key::of(VOLUME, new.name.as_str());
        let origin = new.source.as_ref().map(|source| self.origin(source)).transpose()?;
        let record = self.plan_volume(&new, origin.as_ref())?;
        let tuning = Tuning::parse(record.kind, &new.mutable, &self.tunable())?;
        let reservation = self.reserve(&new.parameters, record.size)?;

        let (plan, name) = (record.clone(), key.to_string());
        self.blocking(move |inner| inner.build_volume(&name, &plan, origin.as_ref(), &tuning)).await?;
        let recorded = self.journal.put(volume_key(key), to_json(&record), super::VOLUMES).await;
        if let Err(error) = recorded {
            if matches!(error, journal::Error::Full(_)) {
                self.blocking(move |inner| Ok(inner.trash.discard(&inner.volumes, &key.to_string())?))
                    .await?;
            }
            return Err(error.into());
        }
        let mut state = self.state();
        let record = state.put_volume(key, record);
        drop(state);
        drop(reservation);
        Ok(self.describe_volume(key, &record))
    }

    fn origin(&self, source: &ContentSource) -> Result<Origin> {
        match source {
            ContentSource::Volume(id) => {
                let (key, record) = self.existing_volume(id)?;
                let (kind, size, filesystem) = (record.kind, record.size, record.filesystem);
                Ok(Origin {
                    source: Source::Volume(key),
                    key,
                    dir: self.volume_dir(key)?,
                    kind,
                    size,
                    filesystem,
                })
            }
            ContentSource::Snapshot(id) => {
                let (key, record) = self.existing_snapshot(id)?;
                let dir = self.snapshots.dir(&key.to_string())?;
                let (kind, size, filesystem) = (record.kind, record.size, record.filesystem);
                Ok(Origin { source: Source::Snapshot(key), key, dir, kind, size, filesystem })
            }
        }
    }

    /// Decides everything about a new volume without touching the disk.
    fn plan_volume(&self, new: &NewVolume, origin: Option<&Origin>) -> Result<VolumeRecord> {
        let access =
            new.capabilities.first().map_or(AccessKind::Mount, |capability| capability.access.kind());
        let kind = self.choose_kind(&new.parameters, access, origin.map(|origin| origin.kind))?;
        let asked = if kind == Kind::Image { filesystem_asked(&new.capabilities)? } else { None };
        let filesystem = match origin {
            Some(origin) => origin.filesystem.or(asked),
            None => asked,
        };
        let least = [
            origin.map_or(0, |origin| origin.size),
            filesystem.filter(|_| access == AccessKind::Mount).map_or(0, format::minimum_size),
        ];
        let size = choose_size(&new.range, least.into_iter().max().unwrap_or(0))?;
        if size > self.config.max_volume_size {
            return Err(Error::OutOfRange(format!(
                "{size} is above the largest volume this driver makes, {}",
                self.config.max_volume_size
            )));
        }
        Ok(VolumeRecord {
            name: new.name.as_str().into(),
            size: size.bytes(),
            kind,
            access,
            filesystem,
            parameters: Arc::new(new.parameters.clone()),
            mutable: Arc::new(new.mutable.clone()),
            source: origin.map(|origin| origin.source),
            attachments: Vec::new(),
            ephemeral: new.ephemeral,
        })
    }

    /// The kind a class asks for, refusing parameters that mean nothing here.
    fn choose_kind(&self, parameters: &Parameters, access: AccessKind, origin: Option<Kind>) -> Result<Kind> {
        let mut asked = None;
        for (key, value) in parameters {
            match key.as_str() {
                "kind" if !self.config.pools.is_empty() => {
                    if !self.config.pools.contains_key(value) {
                        return Err(Error::Invalid(format!("parameter kind: there is no pool {value:?}")));
                    }
                }
                "kind" => asked = Some(value.parse::<Kind>()?),
                key if key.starts_with(KUBERNETES_PARAMETER_PREFIX)
                    || self.config.ignore_unknown_parameters => {}
                key => {
                    return Err(Error::Invalid(format!(
                        "unknown parameter {key:?}; this driver takes only kind"
                    )));
                }
            }
        }
        let kind = match (asked, origin) {
            (Some(asked), Some(origin)) if asked != origin => {
                return Err(Error::Invalid(format!(
                    "parameter kind={asked} does not fit its source, which is of kind {origin}"
                )));
            }
            (Some(asked), _) => asked,
            (None, Some(origin)) => origin,
            (None, None) if access == AccessKind::Block => Kind::Image,
            (None, None) => self.default_kind,
        };
        match kind {
            Kind::Btrfs if !self.offers_btrfs => Err(Error::Invalid(format!(
                "parameter kind=btrfs needs the data directory {} on a btrfs filesystem with quotas",
                self.root.path().display()
            ))),
            Kind::Btrfs | Kind::Dir if access == AccessKind::Block => Err(Error::Invalid(format!(
                "a volume of kind {kind} cannot be a raw block device; kind image can"
            ))),
            kind => Ok(kind),
        }
    }

    /// Builds a volume in `incoming/` and moves it into place.
    fn build_volume(
        &self,
        name: &str,
        plan: &VolumeRecord,
        origin: Option<&Origin>,
        tuning: &Tuning,
    ) -> Result<()> {
        self.trash.discard(&self.incoming, name)?;
        // An earlier call may have been refused its record after this point; what it made was never promised.
        self.trash.discard(&self.volumes, name)?;
        let built = (|| {
            let dir = self.incoming.ensure_dir(name, 0o700)?;
            match origin {
                None => content::create(&dir, plan.kind, plan.size)?,
                Some(origin) => {
                    let capture = Capture {
                        source: origin.key,
                        kind: plan.kind,
                        from: Dir::open(origin.dir.path())?,
                        to: self.incoming.dir(name)?,
                        read_only: false,
                    };
                    content::capture(&[capture], &self.incoming, &self.devices, self.reflink)?;
                    content::adopt_copy(&dir, plan.kind, plan.filesystem, plan.size)?;
                }
            }
            content::tune(&dir, tuning)?;
            Ok(self.incoming.rename(name, &self.volumes, name)?)
        })();
        if built.is_err() {
            self.trash.discard(&self.incoming, name)?;
        }
        built
    }

    pub(super) async fn delete_volume(self: &Arc<Self>, id: &VolumeId) -> Result<()> {
        let Some(key) = Key::parse(VOLUME, id.as_str()) else { return Ok(()) };
        self.journal.remove(volume_key(key)).await?;
        self.walks().remove(&key);
        let discarded = self.blocking(move |inner| {
            let name = key.to_string();
            if let Err(error) = inner.devices.release(key, &content::image_path(&inner.volumes, key)) {
                // Someone outside Kubernetes holds the device; the kernel lets go of it and of the file with him.
                tracing::warn!(volume.id = %key, error = error.sentence(), "a deleted volume's device is still in use");
            }
            Ok(inner.trash.discard(&inner.volumes, &name)?)
        });
        discarded.await?;
        // Not before: whoever makes one of the same name now would have its data discarded.
        self.state().remove_volume(key);
        Ok(())
    }

    pub(super) async fn attach(
        self: &Arc<Self>,
        id: &VolumeId,
        attachment: &Attachment,
    ) -> Result<BTreeMap<String, String>> {
        self.change_volume(id, |record| {
            record.attachments.retain(|existing| *existing.node != *attachment.node.as_str());
            record.attachments.push(AttachmentRecord::new(attachment));
        })
        .await?;
        Ok(BTreeMap::new())
    }

    pub(super) async fn detach(self: &Arc<Self>, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        self.change_volume(id, |record| match node {
            Some(node) => record.attachments.retain(|existing| *existing.node != *node.as_str()),
            None => record.attachments.clear(),
        })
        .await
    }

    /// Records a changed volume; nothing is written if nothing changed.
    async fn change_volume(&self, id: &VolumeId, change: impl FnOnce(&mut VolumeRecord)) -> Result<()> {
        let (key, old) = self.existing_volume(id)?;
        let mut record = VolumeRecord::clone(&old);
        change(&mut record);
        if record != *old {
            self.journal.put(volume_key(key), to_json(&record), Barrier::None).await?;
            let used = self.known_use(key);
            let mut state = self.state();
            state.put_volume(key, record);
            state.set_used(key, used);
        }
        Ok(())
    }

    fn known_use(&self, key: Key) -> u64 {
        self.state().used_by(key)
    }

    pub(super) async fn expand_volume(
        self: &Arc<Self>,
        id: &VolumeId,
        range: CapacityRange,
    ) -> Result<Expanded> {
        let (key, record) = self.existing_volume(id)?;
        let wanted = choose_growth(&range, record.size)?;
        if wanted > self.config.max_volume_size {
            return Err(Error::OutOfRange(format!(
                "{wanted} is above the largest volume this driver makes, {}",
                self.config.max_volume_size
            )));
        }
        if wanted.bytes() > record.size {
            let reservation = self.reserve(&record.parameters, wanted.bytes() - record.size)?;
            let kind = record.kind;
            self.blocking(move |inner| inner.grow_content(key, kind, wanted.bytes())).await?;
            self.change_volume(id, |record| record.size = wanted.bytes()).await?;
            drop(reservation);
        }
        let node_expansion_required = record.kind == Kind::Image
            && record.access == AccessKind::Mount
            && self.config.features.has(crate::Feature::NodeExpand);
        Ok(Expanded { capacity: wanted, node_expansion_required })
    }

    fn grow_content(&self, key: Key, kind: Kind, size: u64) -> Result<()> {
        content::grow(&self.volume_dir(key)?, kind, size)?;
        let image = content::image_path(&self.volumes, key);
        let devices = [self.devices.writable(key, &image)?, self.devices.read_only(key, &image)?];
        for device in devices.into_iter().flatten() {
            loopdev::refresh_capacity(device.number())?;
        }
        Ok(())
    }

    pub(super) async fn modify_volume(self: &Arc<Self>, id: &VolumeId, mutable: Parameters) -> Result<()> {
        let (key, record) = self.existing_volume(id)?;
        let tunable = self.tunable();
        let tuning = Tuning::parse(record.kind, &mutable, &tunable)?;
        let merged: Parameters =
            record.mutable.iter().map(|(k, v)| (k.clone(), v.clone())).chain(mutable).collect();
        let all = Tuning::parse(record.kind, &merged, &tunable)?;
        let before = Tuning::parse(record.kind, &record.mutable, &tunable)?;
        self.blocking(move |inner| {
            let apply = |content: &Tuning, device: &Tuning| {
                content::tune(&inner.volume_dir(key)?, content)?;
                inner.tune_device(key, device)
            };
            // All or none: what was applied before one failed is taken back.
            apply(&tuning, &all).inspect_err(|_| {
                if let Err(error) = apply(&before, &before) {
                    tracing::warn!(volume.id = %key, %error, "could not return to the former parameters");
                }
            })
        })
        .await?;
        self.change_volume(id, |record| record.mutable = Arc::new(merged)).await
    }

    pub(super) fn list_volumes(&self, page: &PageRequest) -> Result<Page<Volume>> {
        let after = page_start(VOLUME, page)?;
        let state = self.state();
        let found: Vec<_> = state
            .volumes_after(after)
            .take(page.limit.saturating_add(1))
            .map(|(key, record)| (key, record.clone()))
            .collect();
        drop(state);
        Ok(into_page(VOLUME, page, found, |key, record| self.describe_volume(key, &record)))
    }

    pub(super) fn describe_volume(&self, key: Key, record: &VolumeRecord) -> Volume {
        let mut context: BTreeMap<String, String> = record
            .parameters
            .iter()
            .filter(|(key, _)| !key.starts_with(KUBERNETES_PARAMETER_PREFIX))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        context.entry("kind".to_owned()).or_insert_with(|| record.kind.as_str().to_owned());
        Volume {
            id: key.id(VOLUME),
            capacity: Capacity::new(record.size),
            access: record.access,
            parameters: record.parameters.clone(),
            mutable: record.mutable.clone(),
            context,
            source: record.source.map(|source| match source {
                Source::Snapshot(key) => ContentSource::Snapshot(key.id(SNAPSHOT)),
                Source::Volume(key) => ContentSource::Volume(key.id(VOLUME)),
            }),
            topology: self.topology.clone(),
            ephemeral: record.ephemeral,
            attachments: record.attachments.iter().filter_map(AttachmentRecord::attachment).collect(),
        }
    }
}

/// The journal key of a volume.
pub(super) fn volume_key(key: Key) -> String {
    format!("{VOLUME}-{key}")
}

/// A record as it is written.
pub(super) fn to_json(record: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(record).expect("a record always becomes JSON")
}

/// Where a page starts. A token is the last id of the page before; anything else was never given out.
pub(super) fn page_start(prefix: &str, page: &PageRequest) -> Result<Option<Key>> {
    let Some(token) = &page.after else { return Ok(None) };
    match Key::parse(prefix, token) {
        Some(key) => Ok(Some(key)),
        None => Err(Error::Busy(format!(
            "starting_token {:?} was not given out by this driver; list again from the start",
            token.chars().take(80).collect::<String>()
        ))),
    }
}

/// Cuts a page out of entries of which one more was read than fits.
pub(super) fn into_page<R, T>(
    prefix: &str,
    page: &PageRequest,
    mut found: Vec<(Key, R)>,
    describe: impl Fn(Key, R) -> T,
) -> Page<T> {
    let more = found.len() > page.limit;
    found.truncate(page.limit);
    let next = found.last().filter(|_| more).map(|(key, _)| format!("{prefix}-{key}"));
    Page { entries: found.into_iter().map(|(key, record)| describe(key, record)).collect(), next }
}

//! Volumes from the controller's side: create, delete, attach, expand, modify, list.

use std::{collections::BTreeMap, sync::Arc};

use berth_core::{
    AccessKind, Capacity, CapacityRange, Name, NodeId, Topology, VolumeCapability, VolumeId,
    names::KUBERNETES_PARAMETER_PREFIX,
};
use berth_host::{format::Filesystem, loopdev, namespace, path::Dir};

use berth_journal::{self as journal, Barrier};

use super::{
    Inner, Local,
    content::{self, Capture, Copied},
    kind::{Consistency, Kind, Tuning},
    record::{AttachmentRecord, Key, SNAPSHOT, Source, VOLUME, VolumeRecord},
};
use crate::{
    Attachment, AvailableCapacity, CapacityInfo, Cloning, ContentSource, Context, Error, Expanded, Expansion,
    InlineVolumes, Listing, Modification, NewVolume, Page, PageRequest, Parameters, Placement,
    ReadOnlyAttachment, Result, Snapshot, Supports, TopologyRequirement, Volume, Volumes,
    image::{self, DEFAULT_SIZE, filesystem_asked},
};

/// A volume to make, with what its class says.
#[derive(Debug)]
pub struct Plan {
    new: NewVolume,
    class: Class,
    content: ContentPlan,
}

/// The parameters of a StorageClass.
#[derive(Debug, Clone, Copy, Default)]
struct Class {
    kind: Option<Kind>,
    consistency: Consistency,
}

/// What a new volume will be, as far as its class and its source decide it.
#[derive(Debug)]
struct ContentPlan {
    kind: Kind,
    filesystem: Option<Filesystem>,
    tuning: Tuning,
}

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

impl Volumes for Local {
    type Plan = Plan;

    fn supports(&self) -> Supports {
        Supports::filesystem().and_block().on_many_nodes()
    }

    fn plan(&self, _: &Context, new: &NewVolume) -> Result<Plan> {
        let class = self.0.parse_class(&new.parameters)?;
        let content = self.0.plan_content(new, class.kind, None)?;
        Ok(Plan { new: new.clone(), class, content })
    }

    async fn find(&self, _: &Context, plan: &Plan) -> Result<Option<Volume>> {
        self.0.find_volume(&plan.new.name)
    }

    async fn create(&self, ctx: &Context, plan: Plan) -> Result<Volume> {
        self.make(ctx, plan, None).await
    }

    async fn get(&self, _: &Context, id: &VolumeId) -> Result<Option<Volume>> {
        Ok(self.0.volume(id).map(|(key, record)| self.0.describe_volume(key, &record)))
    }

    async fn delete(&self, _: &Context, id: &VolumeId) -> Result<()> {
        let Some((key, _)) = self.0.volume(id) else { return Ok(()) };
        self.0.journal.remove(volume_key(key)).await?;
        self.0.walks().remove(&key);
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
        self.0.state().remove_volume(key);
        Ok(())
    }
}

impl InlineVolumes for Local {
    async fn find_inline(&self, _: &Context, name: &Name) -> Result<Option<Volume>> {
        self.0.find_volume(name)
    }
}

impl Cloning for Local {
    async fn clone_volume(&self, ctx: &Context, plan: Plan, source: &Volume) -> Result<Volume> {
        let (key, record) = self.0.existing_volume(&source.id)?;
        let (kind, size, filesystem) = (record.kind, record.size, record.filesystem);
        let (source, dir) = (Source::Volume(key), self.0.volume_dir(key)?);
        self.make(ctx, plan, Some(Origin { source, key, dir, kind, size, filesystem })).await
    }
}

impl Placement for Local {
    async fn place(
        &self,
        _: &Context,
        _: &mut Plan,
        wanted: Option<&TopologyRequirement>,
    ) -> Result<Topology> {
        let here = self.0.topology.as_deref();
        TopologyRequirement::check(wanted, here)?;
        here.cloned().ok_or_else(|| Error::internal("this node has no topology"))
    }
}

impl Listing for Local {
    async fn list(&self, _: &Context, page: &PageRequest) -> Result<Page<Volume>> {
        let after = page_start(VOLUME, page)?;
        let state = self.0.state();
        let found: Vec<_> = state
            .volumes_after(after)
            .take(page.limit.saturating_add(1))
            .map(|(key, record)| (key, record.clone()))
            .collect();
        drop(state);
        Ok(into_page(VOLUME, page, found, |key, record| self.0.describe_volume(key, &record)))
    }
}

impl CapacityInfo for Local {
    async fn available_capacity(
        &self,
        _: &Context,
        parameters: &Parameters,
        topology: Option<&Topology>,
    ) -> Result<AvailableCapacity> {
        let here = self.0.topology.as_deref();
        if topology.is_some_and(|wanted| here.is_some_and(|here| !here.satisfies(wanted))) {
            let available = Capacity::ZERO;
            return Ok(AvailableCapacity { available, largest_volume: None, smallest_volume: None });
        }
        let available = self.0.available(parameters)?;
        Ok(AvailableCapacity {
            available,
            largest_volume: Some(available.min(self.0.config.max_volume_size)),
            smallest_volume: None,
        })
    }
}

impl Attachment for Local {
    async fn attach(
        &self,
        _: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        self.note_attached(volume, AttachmentRecord::new(node, false, capability.mode), node).await
    }

    async fn detach(&self, _: &Context, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        self.0
            .change_volume(id, |record| match node {
                Some(node) => record.attachments.retain(|existing| *existing.node != *node.as_str()),
                None => record.attachments.clear(),
            })
            .await
    }
}

impl ReadOnlyAttachment for Local {
    async fn attach_read_only(
        &self,
        _: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        self.note_attached(volume, AttachmentRecord::new(node, true, capability.mode), node).await
    }
}

impl Expansion for Local {
    async fn expand(&self, _: &Context, volume: &Volume, range: CapacityRange) -> Result<Expanded> {
        let (key, record) = self.0.existing_volume(&volume.id)?;
        let now = Capacity::new(record.size);
        let wanted = range.required().unwrap_or(now).max(now);
        if wanted > self.0.config.max_volume_size {
            return Err(Error::OutOfRange(format!(
                "{wanted} is above the largest volume this driver makes, {}",
                self.0.config.max_volume_size
            )));
        }
        let grown = VolumeRecord { size: wanted.bytes(), ..VolumeRecord::clone(&record) };
        check_limit(&range, &grown)?;
        if wanted > now {
            let (kind, length) = (record.kind, grown.length());
            let reservation = self.0.reserve(&record.parameters, length - record.length())?;
            self.blocking(move |inner| inner.grow_content(key, kind, length)).await?;
            self.0.change_volume(&volume.id, |record| record.size = wanted.bytes()).await?;
            drop(reservation);
        }
        let node_expansion_required =
            record.kind == Kind::Image && record.access == AccessKind::Mount && self.0.config.node_expansion;
        Ok(Expanded { capacity: wanted, node_expansion_required })
    }
}

impl Modification for Local {
    async fn modify(&self, _: &Context, volume: &Volume, mutable: Parameters) -> Result<()> {
        let (key, record) = self.0.existing_volume(&volume.id)?;
        let tunable = self.0.tunable();
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
        self.0.change_volume(&volume.id, |record| record.mutable = Arc::new(merged)).await
    }
}

impl Local {
    /// Restores a snapshot; the rest of the snapshots' trait is in `snapshots.rs`.
    pub(super) async fn make_from_snapshot(
        &self,
        ctx: &Context,
        plan: Plan,
        snapshot: &Snapshot,
    ) -> Result<Volume> {
        let (key, record) = self.0.existing_snapshot(&snapshot.id)?;
        let dir = self.0.snapshots.dir(&key.to_string())?;
        let (kind, size, filesystem) = (record.kind, record.size, record.filesystem);
        let source = Source::Snapshot(key);
        self.make(ctx, plan, Some(Origin { source, key, dir, kind, size, filesystem })).await
    }

    /// Builds a volume beside the others, moves it into place, and records it.
    async fn make(&self, ctx: &Context, plan: Plan, origin: Option<Origin>) -> Result<Volume> {
        let Plan { new, class, mut content } = plan;
        if let Some(origin) = origin.as_ref().filter(|origin| origin.kind != content.kind) {
            content = self.0.plan_content(&new, class.kind, Some(origin.kind))?;
        }
        let key = Key::of(VOLUME, new.name.as_str());
        let record = self.0.plan_record(new, &content, origin.as_ref())?;
        let reservation = self.0.reserve(&record.parameters, record.length())?;

        let (planned, name) = (record.clone(), key.to_string());
        let built = self.blocking(move |inner| {
            inner.build_volume(&name, &planned, origin.as_ref(), &content.tuning, class.consistency)
        });
        if built.await? == Copied::Torn {
            ctx.warn(content::TORN);
        }
        let recorded = self.0.journal.put(volume_key(key), to_json(&record), super::VOLUMES).await;
        let discard = move |inner: &Inner| Ok(inner.trash.discard(&inner.volumes, &key.to_string())?);
        self.undo_unrecorded(recorded, discard).await?;
        let mut state = self.0.state();
        let record = state.put_volume(key, record);
        drop(state);
        drop(reservation);
        Ok(self.0.describe_volume(key, &record))
    }

    /// Has `discard` take back what could not be recorded for want of room. After any other failure the record may be on the
    /// disk, and the next start sees what is there: the caller has to ask again, and not to forget it.
    pub(super) async fn undo_unrecorded(
        &self,
        recorded: std::result::Result<(), journal::Error>,
        discard: impl FnOnce(&Inner) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let Err(error) = recorded else { return Ok(()) };
        let left = match &error {
            journal::Error::Full(_) => self.blocking(discard).await.err(),
            journal::Error::Broken(_) => Some(Error::State("its record may have been written".to_owned())),
        };
        let error = Error::from(error);
        Err(match left {
            Some(left) => error.unfinished(&left),
            None => error,
        })
    }

    async fn note_attached(
        &self,
        volume: &Volume,
        attached: AttachmentRecord,
        node: &NodeId,
    ) -> Result<BTreeMap<String, String>> {
        if *node != self.0.config.node {
            return Err(Error::not_found("node", node));
        }
        // Two calls that count at the same time would both find the last place free.
        let _turn = self.0.attaching.lock().await;
        let repeated = volume.attachments.iter().any(|known| known.node == *node);
        if let Some(limit) = self.0.config.max_volumes.filter(|_| !repeated) {
            let count = self.0.state().attached_to(node.as_str());
            if count >= usize::try_from(limit).unwrap_or(usize::MAX) {
                return Err(Error::Exhausted(format!(
                    "node {node:?} has {count} volumes, its limit is {limit}"
                )));
            }
        }
        self.0
            .change_volume(&volume.id, |record| {
                record.attachments.retain(|existing| existing.node != attached.node);
                record.attachments.push(attached);
            })
            .await?;
        Ok(BTreeMap::new())
    }
}

impl Inner {
    fn find_volume(&self, name: &Name) -> Result<Option<Volume>> {
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

    /// Decides what a new volume will be, given its class and the kind of its source.
    fn plan_content(
        &self,
        new: &NewVolume,
        asked: Option<Kind>,
        origin: Option<Kind>,
    ) -> Result<ContentPlan> {
        let kind = self.choose_kind(asked, new.access(), origin)?;
        let filesystem = if kind == Kind::Image { filesystem_asked(&new.capabilities)? } else { None };
        let tuning = Tuning::parse(kind, &new.mutable, &self.tunable())?;
        Ok(ContentPlan { kind, filesystem, tuning })
    }

    /// The record of a new volume.
    fn plan_record(
        &self,
        new: NewVolume,
        content: &ContentPlan,
        origin: Option<&Origin>,
    ) -> Result<VolumeRecord> {
        let access = new.access();
        let filesystem = origin.and_then(|origin| origin.filesystem).or(content.filesystem);
        let least = Capacity::new(origin.map_or(0, |origin| origin.size));
        let size = new.range.choose(DEFAULT_SIZE.max(least)).max(least);
        if size > self.config.max_volume_size {
            return Err(Error::OutOfRange(format!(
                "{size} is above the largest volume this driver makes, {}",
                self.config.max_volume_size
            )));
        }
        let record = VolumeRecord {
            name: new.name.as_str().into(),
            size: size.bytes(),
            kind: content.kind,
            access,
            filesystem,
            parameters: Arc::new(new.parameters),
            mutable: Arc::new(new.mutable),
            source: origin.map(|origin| origin.source),
            attachments: Vec::new(),
            ephemeral: new.ephemeral,
        };
        check_limit(&new.range, &record)?;
        Ok(record)
    }

    /// Reads the parameters of a class, and refuses those that mean nothing here.
    fn parse_class(&self, parameters: &Parameters) -> Result<Class> {
        let mut class = Class::default();
        for (key, value) in parameters {
            match key.as_str() {
                "kind" if !self.config.pools.is_empty() => {
                    if !self.config.pools.contains_key(value) {
                        return Err(Error::Invalid(format!("parameter kind: there is no pool {value:?}")));
                    }
                }
                "kind" => class.kind = Some(value.parse::<Kind>()?),
                Consistency::PARAMETER => class.consistency = value.parse()?,
                key if key.starts_with(KUBERNETES_PARAMETER_PREFIX)
                    || self.config.ignore_unknown_parameters => {}
                key => {
                    return Err(Error::Invalid(format!(
                        "unknown parameter {key:?}; this driver takes kind and consistency"
                    )));
                }
            }
        }
        Ok(class)
    }

    fn choose_kind(&self, asked: Option<Kind>, access: AccessKind, origin: Option<Kind>) -> Result<Kind> {
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
            Kind::Btrfs | Kind::Image if namespace::is_restricted() => Err(Error::Invalid(match (asked, access) {
                (None, AccessKind::Block) => {
                    "a raw block device needs a loop device, which only root may use: this driver runs without root"
                        .to_owned()
                }
                _ => format!(
                    "parameter kind={kind} needs root, as whom this driver does not run; kind=dir does not need it"
                ),
            })),
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
        consistency: Consistency,
    ) -> Result<Copied> {
        self.trash.discard(&self.incoming, name)?;
        // An earlier call may have been refused its record after this point; what it made was never promised.
        self.trash.discard(&self.volumes, name)?;
        let built = (|| {
            let mut copied = Copied::AtOneInstant;
            let dir = self.incoming.ensure_dir(name, 0o700)?;
            match origin {
                None => content::create(&dir, plan.kind, plan.length())?,
                Some(origin) => {
                    let capture = Capture {
                        source: origin.key,
                        kind: plan.kind,
                        from: Dir::open(origin.dir.path())?,
                        to: self.incoming.dir(name)?,
                        read_only: false,
                    };
                    let settings = (&self.incoming, &self.devices, self.reflink);
                    copied = content::capture(&[capture], settings, consistency)?;
                    content::adopt_copy(&dir, plan.kind, plan.filesystem, plan.length())?;
                }
            }
            content::tune(&dir, tuning)?;
            self.incoming.rename(name, &self.volumes, name)?;
            Ok(copied)
        })();
        if built.is_err() {
            self.trash.discard(&self.incoming, name)?;
        }
        built
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

    fn grow_content(&self, key: Key, kind: Kind, size: u64) -> Result<()> {
        content::grow(&self.volume_dir(key)?, kind, size)?;
        let image = content::image_path(&self.volumes, key);
        let devices = [self.devices.writable(key, &image)?, self.devices.read_only(key, &image)?];
        for device in devices.into_iter().flatten() {
            loopdev::refresh_capacity(device.number())?;
        }
        Ok(())
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
            access: Some(record.access),
            parameters: record.parameters.clone(),
            mutable: record.mutable.clone(),
            context,
            source: record.source.map(|source| match source {
                Source::Snapshot(key) => ContentSource::Snapshot(key.id(SNAPSHOT)),
                Source::Volume(key) => ContentSource::Volume(key.id(VOLUME)),
            }),
            topology: self.topology.clone(),
            ephemeral: record.ephemeral,
            attachments: record.attachments.iter().filter_map(AttachmentRecord::attached).collect(),
        }
    }
}

/// Refuses a volume that would be larger than the caller allows.
fn check_limit(range: &CapacityRange, record: &VolumeRecord) -> Result<()> {
    if record.kind == Kind::Image {
        let filesystem = record.filesystem.filter(|_| record.access == AccessKind::Mount);
        image::check_length(range, record.length(), filesystem)?;
    }
    match range.limit() {
        Some(limit) if record.size > limit.bytes() => Err(Error::OutOfRange(format!(
            "the volume has {} bytes or must hold its source's, which is above limit_bytes ({}); volumes never shrink",
            record.size,
            limit.bytes()
        ))),
        _ => Ok(()),
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

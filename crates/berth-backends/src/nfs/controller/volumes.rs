//! Volumes from the controller's side: create, delete, expand, list, and how much room there is.

use std::sync::Arc;

use berth_core::{Access, AccessKind, Capacity, CapacityRange, Topology, VolumeCapability, VolumeId};
use berth_nfs::{Attributes, Change, Cookie, Entry, Handle, Kind, Share};
use futures_util::{StreamExt as _, TryStreamExt as _, future::join_all, stream};

use tokio::sync::OnceCell;

use super::{
    NfsController, capacity,
    content::{self, copy_at_rest},
    id::{OnDelete, ShareName, SnapshotRef, SubPath, VolumeRef},
    parameters::{self, Class, OwnerAndMode, VolumeKind, context_of},
    record::{self, RecordDir, SourceRecord, VolumeRecord, key_of},
    shares::{Reach, failed, find_dir},
    snapshots::{is_snapshot, kind_of},
};
use crate::{
    AvailableCapacity, CapacityInfo, Cloning, ContentSource, Context, Error, Expanded, Expansion, Listing,
    NewVolume, Page, PageRequest, Parameters, Result, Supports, Volume, Volumes, image,
};

/// What `mkdir -p` under the usual umask gives.
const DEFAULT_MODE: u32 = 0o755;
/// How often a directory is made again whose parent was removed meanwhile with the last volume in it.
const ATTEMPTS: u32 = 5;
/// How many requests of a listing are under way at once.
const AT_ONCE: usize = 16;

/// All that a volume's creation needs, read once from its request.
#[derive(Debug)]
pub struct VolumePlan {
    volume: VolumeRef,
    kind: VolumeKind,
    /// Whether other volumes may use its directory too.
    shared: bool,
    ownership: OwnerAndMode,
    range: CapacityRange,
    capabilities: Vec<VolumeCapability>,
    parameters: Parameters,
    reach: Reach,
    /// The share, once it was reached.
    share: OnceCell<Share>,
}

impl Volumes for NfsController {
    type Plan = VolumePlan;

    fn supports(&self) -> Supports {
        Supports::filesystem().on_many_nodes()
    }

    fn plan(&self, ctx: &Context, new: &NewVolume) -> Result<VolumePlan> {
        let class = Class::parse(&new.parameters)?;
        class.kind.check(&new.capabilities)?;
        Ok(VolumePlan {
            volume: class.volume(&new.name, &new.parameters, self.0.config.on_delete)?,
            kind: class.kind,
            // An image belongs to one volume alone.
            shared: class.shared && class.kind == VolumeKind::Directory,
            ownership: OwnerAndMode {
                mode: class.ownership.mode.or(self.0.config.mount_permissions),
                ..class.ownership
            },
            range: new.range,
            capabilities: new.capabilities.clone(),
            parameters: new.parameters.clone(),
            reach: Reach::by_class(options_of(new, &class), ctx),
            share: OnceCell::new(),
        })
    }

    fn check(&self, _: &Context, new: &NewVolume) -> Result<()> {
        let class = Class::parse(&new.parameters)?;
        class.kind.check(&new.capabilities)?;
        class.share().map(drop)
    }

    fn agrees(&self, volume: &Volume, known: &Parameters, pair: (&str, &str)) -> bool {
        parameters::agrees(volume, known, pair)
    }

    // Its directory is there, and its record says that it is this volume's.
    async fn find(&self, _: &Context, plan: &VolumePlan) -> Result<Option<Volume>> {
        let (volume, share) = (&plan.volume, self.share_of(plan).await?);
        let Some(record) = record::read::<VolumeRecord>(share, RecordDir::Volumes, &key(volume)).await?
        else {
            return Ok(None);
        };
        let Some(directory) = find_dir(share, volume.dir.as_str()).await? else { return Ok(None) };
        // Whoever made it may have been killed before it got its owner and its limit.
        if record.parameters == plan.parameters && plan.kind == VolumeKind::Directory {
            apply(share, &directory, plan.ownership, None).await.map_err(is_there)?;
        }
        self.limit(share, volume, volume.dir.as_str(), &record).await.map_err(is_there)?;
        Ok(Some(describe(parse_id(volume), volume, Some(record))))
    }

    async fn create(&self, _: &Context, plan: VolumePlan) -> Result<Volume> {
        self.make(plan, None).await
    }

    async fn get(&self, ctx: &Context, id: &VolumeId) -> Result<Option<Volume>> {
        // What cannot be an id of ours is the id of nothing.
        let Ok(volume) = VolumeRef::parse(id.as_str()) else { return Ok(None) };
        let share = self.visit(&volume.share, &Reach::by_id(ctx)).await?;
        if find_dir(&share, volume.dir.as_str()).await?.is_none() {
            return Ok(None);
        }
        let record = record::read(&share, RecordDir::Volumes, &key(&volume)).await?;
        Ok(Some(describe(id.clone(), &volume, record)))
    }

    async fn delete(&self, ctx: &Context, id: &VolumeId) -> Result<()> {
        // What cannot be an id of ours has left nothing.
        let Ok(volume) = VolumeRef::parse(id.as_str()) else { return Ok(()) };
        let share = self.visit(&volume.share, &Reach::by_id(ctx)).await?;
        let policy = volume.on_delete().or(self.0.config.on_delete).unwrap_or_default();
        let _turn =
            if volume.uuid.is_empty() { None } else { Some(self.0.shares.take_turn(&volume.share).await) };
        let users = self.directory_users(&share, &volume).await?;
        // Before its record is gone, so that a deletion that was cut short is begun again.
        self.free_project(&share, &volume).await?;
        record::remove(&share, RecordDir::Volumes, &key(&volume)).await?;
        let parent = if policy == OnDelete::Retain { None } else { parent_of(&share, &volume.dir).await? };
        if let Some(parent) = parent {
            let kept = match (users.reason_to_keep(), policy) {
                (Some(reason), _) => Some(reason),
                (None, OnDelete::Archive) => self.archive(&share, &volume, &parent).await?,
                (None, _) => {
                    self.discard(&share, &volume, &parent, volume.dir.name()).await?;
                    None
                }
            };
            match kept {
                None => prune(&share, &volume.dir).await,
                Some(reason) => {
                    let dir = volume.dir.as_str();
                    let warning = format!("directory {dir:?} on {} is kept: {reason}", volume.share);
                    tracing::warn!(volume.id = %volume, "{warning}");
                    ctx.warn(warning);
                }
            }
        }
        self.leave_directory(&share, &volume, &users).await
    }
}

impl Cloning for NfsController {
    async fn clone_volume(&self, _: &Context, plan: VolumePlan, source: &Volume) -> Result<Volume> {
        self.make(plan, Some(ContentSource::Volume(source.id.clone()))).await
    }
}

impl Expansion for NfsController {
    async fn expand(&self, ctx: &Context, volume: &Volume, range: CapacityRange) -> Result<Expanded> {
        let id = &volume.id;
        let volume = VolumeRef::parse(id.as_str()).map_err(|_| Error::no_volume(id))?;
        let share = self.visit(&volume.share, &Reach::by_id(ctx)).await?;
        let known = record::read(&share, RecordDir::Volumes, &key(&volume)).await?;
        let mut record = known.unwrap_or_else(|| VolumeRecord {
            id: volume.to_string(),
            capacity: 0,
            parameters: Parameters::new(),
            source: None,
            project: None,
        });
        let kind = VolumeKind::of(&record.parameters);
        let wanted = match kind {
            VolumeKind::Directory => range.required().map_or(record.capacity, Capacity::bytes),
            VolumeKind::Image => {
                let wanted = image::choose_growth(&range, record.capacity)?.bytes();
                let dir = find_dir(&share, volume.dir.as_str()).await?.ok_or_else(|| Error::no_volume(id))?;
                let image = content::find(&share, &dir.handle).await?;
                content::ensure_size(&share, &image, wanted.next_multiple_of(image::UNIT)).await?;
                wanted
            }
        };
        if wanted > record.capacity {
            record.capacity = wanted;
            self.limit(&share, &volume, volume.dir.as_str(), &record).await?;
            record::write(&share, RecordDir::Volumes, &key(&volume), &record).await?;
        }
        // A directory has no size of its own: there is nothing to do on the node.
        let node_expansion_required = kind == VolumeKind::Image;
        Ok(Expanded { capacity: capacity(record.capacity), node_expansion_required })
    }
}

impl Listing for NfsController {
    // Those that have a record, share by share.
    async fn list(&self, _: &Context, page: &PageRequest) -> Result<Page<Volume>> {
        let listing = self.listing(RecordDir::Volumes, page).await?;
        let mut volumes = Vec::new();
        let mut last = None;
        for (name, share, keys) in listing {
            let room = page.limit - volumes.len();
            let more = keys.len() > room;
            let taken: Vec<String> = keys.into_iter().take(room).collect();
            last = taken.last().map(|key| token(&name, key)).or(last);
            let found: Vec<Option<Volume>> =
                stream::iter(taken).map(|key| listed(&share, key)).buffered(AT_ONCE).try_collect().await?;
            volumes.extend(found.into_iter().flatten());
            if more {
                return Ok(Page { entries: volumes, next: last });
            }
        }
        Ok(Page { entries: volumes, next: None })
    }
}

impl CapacityInfo for NfsController {
    // What is free on the class's share, or on all known ones where it names none.
    async fn available_capacity(
        &self,
        ctx: &Context,
        parameters: &Parameters,
        _: Option<&Topology>,
    ) -> Result<AvailableCapacity> {
        let class = Class::parse(parameters)?;
        let free = if let Some(share) = class.share()? {
            self.free_on(&share, &Reach::by_class(class.mount_options, ctx)).await?
        } else {
            let (shares, unsaid) = (self.0.shares.all(), Reach::unsaid());
            // A share that does not answer has no room.
            let free = join_all(shares.iter().map(|share| self.free_on(share, &unsaid))).await;
            free.into_iter().flatten().fold(0, u64::saturating_add)
        };
        Ok(AvailableCapacity { available: capacity(free), largest_volume: None, smallest_volume: None })
    }
}

/// The error of a call that found the volume: its caller must not take it that there is none.
fn is_there(error: Error) -> Error {
    error.unfinished(&Error::State("the volume is there".to_owned()))
}

/// How far the creation of a volume has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// The volume is entered as a user of its directory.
    Entered {
        /// Volumes of other shares may have come to use it since.
        nested: bool,
    },
    /// Its record was written.
    Recorded,
    /// Its directory was made.
    Made,
}

impl NfsController {
    /// The share that a plan is about; it is reached once for all steps of a call.
    async fn share_of<'a>(&self, plan: &'a VolumePlan) -> Result<&'a Share> {
        plan.share.get_or_try_init(|| self.visit(&plan.volume.share, &plan.reach)).await
    }

    /// Makes a volume, empty or with the content of its source.
    pub(super) async fn make(&self, plan: VolumePlan, source: Option<ContentSource>) -> Result<Volume> {
        let (volume, share) = (&plan.volume, self.share_of(&plan).await?);
        let nested = self.enter_directory(share, volume, &plan.parameters, plan.shared).await?;
        let mut progress = Progress::Entered { nested };
        match self.make_entered(&plan, source, &mut progress).await {
            Ok(made) => Ok(made),
            Err(error) => Err(self.take_back(share, volume, progress, error).await),
        }
    }

    async fn make_entered(
        &self,
        plan: &VolumePlan,
        source: Option<ContentSource>,
        progress: &mut Progress,
    ) -> Result<Volume> {
        let (volume, share) = (&plan.volume, self.share_of(plan).await?);
        let mut record = VolumeRecord {
            id: volume.to_string(),
            capacity: planned_size(plan)?,
            parameters: plan.parameters.clone(),
            source: source.as_ref().map(SourceRecord::from),
            project: None,
        };
        // What lies in a shared directory cannot count for one of its volumes.
        if plan.kind == VolumeKind::Directory && !plan.shared {
            self.allot(share, volume, &mut record).await?;
        }
        let built = match (plan.kind, &source) {
            (VolumeKind::Directory, None) => None,
            (VolumeKind::Directory, Some(source)) => {
                Some(self.build_directory(plan, share, source, &record).await?)
            }
            (VolumeKind::Image, source) => {
                Some(self.build_image(plan, share, source.as_ref(), &mut record.capacity).await?)
            }
        };
        let nested = *progress == Progress::Entered { nested: true };
        record::write(share, RecordDir::Volumes, &key(volume), &record).await?;
        *progress = Progress::Recorded;
        if nested {
            self.confirm_directory(share, volume, plan.shared).await?;
        }
        match built {
            None => make_directory(share, volume, plan.ownership, progress).await?,
            Some(incoming) => {
                put_in_place(share, &incoming, &key(volume), &volume.dir).await?;
                *progress = Progress::Made;
            }
        }
        self.limit(share, volume, volume.dir.as_str(), &record).await?;
        Ok(describe(parse_id(volume), volume, Some(record)))
    }

    /// Takes back what there is of a volume that could not be made, because nobody may ever ask for it again; returns the
    /// error to answer with. A server that went away cannot be asked now, but its caller repeats the call, and so does one
    /// who hears that something is left.
    async fn take_back(&self, share: &Share, volume: &VolumeRef, progress: Progress, error: Error) -> Error {
        if matches!(error, Error::Unavailable(_) | Error::Busy(_)) {
            return error;
        }
        let take_back = async || {
            let users = self.directory_users(share, volume).await?;
            if progress == Progress::Made
                && users.reason_to_keep().is_none()
                && let Some(parent) = parent_of(share, &volume.dir).await?
            {
                self.discard(share, volume, &parent, volume.dir.name()).await?;
                prune(share, &volume.dir).await;
            }
            if !matches!(progress, Progress::Entered { .. })
                || find_dir(share, volume.dir.as_str()).await?.is_none()
            {
                self.free_project(share, volume).await?;
                record::remove(share, RecordDir::Volumes, &key(volume)).await?;
            }
            // Another replica may have made it meanwhile.
            if record::read::<VolumeRecord>(share, RecordDir::Volumes, &key(volume)).await?.is_none() {
                self.leave_directory(share, volume, &users).await?;
            }
            Ok::<_, Error>(())
        };
        match take_back().await {
            Ok(()) => error,
            Err(left) => {
                tracing::warn!(volume.id = %volume, error = %left, "a part of a volume that was not made stays");
                match progress {
                    Progress::Entered { .. } => error,
                    Progress::Recorded | Progress::Made => error.unfinished(&left),
                }
            }
        }
    }

    /// Builds a copied directory aside, and gives where it is.
    async fn build_directory(
        &self,
        plan: &VolumePlan,
        share: &Share,
        source: &ContentSource,
        record: &VolumeRecord,
    ) -> Result<Handle> {
        let (incoming, copy) = self.copy(plan, share, source, Some(record)).await?;
        apply(share, &copy, plan.ownership, None).await?;
        Ok(incoming)
    }

    /// Builds an image aside, blank or copied, and gives where it is. A copy is as long as its source at least, which is then
    /// the volume's size.
    async fn build_image(
        &self,
        plan: &VolumePlan,
        share: &Share,
        source: Option<&ContentSource>,
        size: &mut u64,
    ) -> Result<Handle> {
        let volume = &plan.volume;
        let length = image::length(*size, image::filesystem_asked(&plan.capabilities)?);
        let Some(source) = source else {
            refuse_content(share, &volume.dir).await?;
            let incoming = RecordDir::Incoming.ensure(share).await?;
            let dir = new_directory(share, &incoming, &key(volume)).await?;
            content::make_blank(share, &dir.handle, length).await?;
            return Ok(incoming);
        };
        let (incoming, copy) = self.copy(plan, share, source, None).await?;
        let copied = content::adopt_copy(share, &copy.handle, length).await?;
        if copied > length {
            *size = copied;
        }
        Ok(incoming)
    }

    /// Copies a volume's first content to a directory in `.berth/incoming`; what an earlier attempt left is used. Where
    /// it is for a directory, the volume's record says how much that may take.
    async fn copy(
        &self,
        plan: &VolumePlan,
        share: &Share,
        source: &ContentSource,
        directory: Option<&VolumeRecord>,
    ) -> Result<(Handle, Entry)> {
        let volume = &plan.volume;
        refuse_content(share, &volume.dir).await?;
        let incoming = RecordDir::Incoming.ensure(share).await?;
        let key = key(volume);
        let path = format!("{}/{key}", RecordDir::Incoming.path());
        let kind = if directory.is_some() { VolumeKind::Directory } else { VolumeKind::Image };
        let limit = async || match directory {
            Some(record) => self.limit(share, volume, &path, record).await,
            None => Ok(()),
        };
        // The class's options and the secret are about the new volume's share, which usually has the source, too.
        let reach = async |other: &ShareName| {
            if *other == volume.share { Ok(share.clone()) } else { self.visit(other, &Reach::unsaid()).await }
        };
        let to = match source {
            ContentSource::Volume(id) => {
                let origin = VolumeRef::parse(id.as_str()).map_err(|_| Error::no_volume(id))?;
                let other = reach(&origin.share).await?;
                let from = find_dir(&other, origin.dir.as_str()).await?;
                let from = from.ok_or_else(|| Error::no_volume(id))?;
                kind.check_source(self.volume_kind(&other, &origin).await?)?;
                let (to, _) = share.make_dirs(&path, &Change::mode(0o700)).await.map_err(failed)?;
                limit().await?;
                let copy = Box::pin(async {
                    other.copy_tree(&from.handle, share, &to.handle).await.map(drop).map_err(failed)
                });
                match kind {
                    VolumeKind::Directory => copy.await?,
                    VolumeKind::Image => copy_at_rest(&other, &from.handle, &key, "a clone", copy).await?,
                }
                // What went away was left out, and from a volume that is being deleted all of it goes.
                let still = find_dir(&other, origin.dir.as_str()).await?;
                if still.is_none_or(|still| still.attributes.fileid != from.attributes.fileid) {
                    return Err(Error::no_volume(id));
                }
                share
                    .set_attributes(&to.handle, &owner_and_mode_of(&from.attributes))
                    .await
                    .map_err(failed)?;
                to
            }
            ContentSource::Snapshot(id) => {
                let snapshot = SnapshotRef::parse(id.as_str()).map_err(|_| Error::no_snapshot(id))?;
                let other = reach(&snapshot.share).await?;
                kind.check_source(kind_of(&other, &snapshot).await?)?;
                let to = new_directory(share, &incoming, &key).await?;
                limit().await?;
                self.unpack_snapshot((id, &snapshot), &other, share, &to.handle).await?;
                to
            }
        };
        Ok((incoming, to))
    }

    /// What a volume is, by its record.
    pub(super) async fn volume_kind(&self, share: &Share, volume: &VolumeRef) -> Result<VolumeKind> {
        let record = record::read::<VolumeRecord>(share, RecordDir::Volumes, &key(volume)).await?;
        Ok(record.map(|record| VolumeKind::of(&record.parameters)).unwrap_or_default())
    }

    /// The keys in one drawer of every known share, from where the page starts.
    pub(super) async fn listing(
        &self,
        drawer: RecordDir,
        page: &PageRequest,
    ) -> Result<Vec<(ShareName, Share, Vec<String>)>> {
        let (first, after) = page_start(page)?;
        let names = self.0.shares.all().into_iter().filter(|name| name.key() >= first);
        // All at once: one that is gone costs its time, and not everybody's.
        let shares =
            join_all(names.map(async |name| (self.visit(&name, &Reach::unsaid()).await, name))).await;
        let mut listing = Vec::new();
        for (share, name) in shares {
            let share = match share {
                Ok(share) => share,
                // One server that is gone must not hide the volumes of all others.
                Err(error) => {
                    tracing::warn!(share = %name, %error, "a share is left out of a listing");
                    continue;
                }
            };
            let mut keys = match drawer.keys(&share).await {
                Ok(keys) => keys,
                Err(error) => {
                    tracing::warn!(share = %name, %error, "a share is left out of a listing");
                    continue;
                }
            };
            if name.key() == first {
                keys.retain(|key| key.as_str() > after.as_str());
            }
            listing.push((name, share, keys));
        }
        Ok(listing)
    }

    async fn free_on(&self, name: &ShareName, reach: &Reach) -> Result<u64> {
        let share = self.visit(name, reach).await?;
        let space = share.space(&share.root()).await.map_err(failed)?;
        Ok(space.bytes_available)
    }
}

/// A record, if the volume is there.
async fn listed(share: &Share, key: String) -> Result<Option<Volume>> {
    let Some(record) = record::read::<VolumeRecord>(share, RecordDir::Volumes, &key).await? else {
        return Ok(None);
    };
    let Ok(volume) = VolumeRef::parse(&record.id) else { return Ok(None) };
    let directory = find_dir(share, volume.dir.as_str()).await?;
    Ok(directory.map(|_| describe(parse_id(&volume), &volume, Some(record))))
}

/// The key of a volume's record.
pub(super) fn key(volume: &VolumeRef) -> String {
    key_of(&volume.to_string())
}

/// A volume's own id.
pub(super) fn parse_id(volume: &VolumeRef) -> VolumeId {
    volume.to_string().parse().expect("an id made of checked parts is an id")
}

/// What a page's token says: the share, and the last key before.
fn page_start(page: &PageRequest) -> Result<(String, String)> {
    let Some(token) = &page.after else { return Ok(Default::default()) };
    let is_key = |key: &str| key.len() == 32 && key.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parsed = token.split_once('.').filter(|(share, key)| is_key(share) && is_key(key));
    let parsed = parsed.map(|(share, key)| (share.to_owned(), key.to_owned()));
    parsed.ok_or_else(|| Error::Busy(format!("starting_token {token:?} was not given by this driver")))
}

/// Where the next page starts.
pub(super) fn token(share: &ShareName, key: &str) -> String {
    format!("{}.{key}", share.key())
}

/// How a class and its mount options want the share to be reached.
fn options_of(wanted: &NewVolume, class: &Class) -> Vec<String> {
    let flags = wanted.capabilities.first().and_then(|capability| match &capability.access {
        Access::Mount { flags, .. } => Some(flags.clone()),
        Access::Block => None,
    });
    flags.unwrap_or_default().into_iter().chain(class.mount_options.iter().cloned()).collect()
}

/// A volume, as the services know it.
fn describe(id: VolumeId, volume: &VolumeRef, record: Option<VolumeRecord>) -> Volume {
    let (capacity, parameters, source, context) = match record {
        Some(record) => {
            let context = if record.parameters.is_empty() {
                context_of(volume)
            } else {
                Class::context(&record.parameters, volume)
            };
            let source = record.source.and_then(|source| source.to_source());
            (capacity(record.capacity), record.parameters, source, context)
        }
        None => (Capacity::ZERO, Parameters::new(), None, context_of(volume)),
    };
    Volume {
        id,
        capacity,
        access: Some(AccessKind::Mount),
        parameters: Arc::new(parameters),
        mutable: Arc::default(),
        context,
        source,
        topology: None,
        attachments: Vec::new(),
        ephemeral: false,
    }
}

fn owner_and_mode_of(attributes: &Attributes) -> Change {
    Change {
        mode: Some(attributes.mode),
        uid: Some(attributes.uid),
        gid: Some(attributes.gid),
        ..Change::default()
    }
}

/// The size of a new volume, as far as its source does not decide it.
fn planned_size(plan: &VolumePlan) -> Result<u64> {
    match plan.kind {
        VolumeKind::Directory => Ok(plan.range.choose(Capacity::ZERO).bytes()),
        VolumeKind::Image => {
            let filesystem = image::filesystem_asked(&plan.capabilities)?;
            Ok(image::choose_size(&plan.range, filesystem)?.bytes())
        }
    }
}

/// An empty directory, in the place of whatever has its name.
async fn new_directory(share: &Share, parent: &Handle, name: &str) -> Result<Entry> {
    share.remove_tree(parent, name).await.map_err(failed)?;
    share.make_dir(parent, name, &Change::mode(0o700)).await.map_err(failed)
}

async fn make_directory(
    share: &Share,
    volume: &VolumeRef,
    ownership: OwnerAndMode,
    progress: &mut Progress,
) -> Result<()> {
    let mode = ownership.mode.unwrap_or(DEFAULT_MODE);
    for attempt in 1.. {
        match share.make_dirs(volume.dir.as_str(), &Change::mode(mode)).await {
            Ok((directory, is_new)) => {
                if !is_new && is_snapshot(share, &volume.share, volume.dir.first()).await? {
                    let dir = volume.dir.as_str();
                    return Err(Error::Precondition(format!(
                        "directory {dir:?} on {} is that of a snapshot",
                        volume.share
                    )));
                }
                if is_new {
                    *progress = Progress::Made;
                }
                // Setting it again, because a server applies its own umask.
                return apply(share, &directory, ownership, is_new.then_some(mode)).await;
            }
            // The last volume beside it was deleted, and the directory above with it.
            Err(error) if matches!(error.kind(), Kind::NotFound | Kind::Stale) && attempt < ATTEMPTS => {}
            Err(error) => return Err(failed(error)),
        }
    }
    unreachable!("the attempts end in a return")
}

/// Gives a directory the owner and mode that it should have, as far as it has others.
async fn apply(
    share: &Share,
    directory: &Entry,
    ownership: OwnerAndMode,
    made_with: Option<u32>,
) -> Result<()> {
    let now = &directory.attributes;
    // A mode that the class gives is set as it is; the usual one leaves an inherited setgid bit.
    let made_with = made_with.filter(|_| ownership.mode.is_none()).map(Change::mode);
    let made_with = made_with.and_then(|change| change.remaining(now)).and_then(|change| change.mode);
    let change = Change {
        mode: ownership.mode.filter(|mode| *mode != now.mode).or(made_with),
        uid: ownership.uid.filter(|uid| *uid != now.uid),
        gid: ownership.gid.filter(|gid| *gid != now.gid),
        ..Change::default()
    };
    if !change.is_empty() {
        share.set_attributes(&directory.handle, &change).await.map_err(failed)?;
    }
    Ok(())
}

/// Refuses a directory that has something in it as the place of a copy.
async fn refuse_content(share: &Share, dir: &SubPath) -> Result<()> {
    let Some(directory) = find_dir(share, dir.as_str()).await? else { return Ok(()) };
    let page = share.read_dir(&directory.handle, Cookie::default()).await.map_err(failed)?;
    if page.entries.is_empty() {
        return Ok(());
    }
    Err(Error::Conflict(format!("the directory {dir:?} is there and not empty; a copy needs one of its own")))
}

/// Renames what was built to where it belongs, in the place of an empty directory if there is one.
async fn put_in_place(share: &Share, incoming: &Handle, key: &str, dir: &SubPath) -> Result<()> {
    for attempt in 1.. {
        let parent = match dir.parent() {
            None => share.root(),
            Some(parent) => {
                let (parent, _) =
                    share.make_dirs(parent.as_str(), &Change::mode(DEFAULT_MODE)).await.map_err(failed)?;
                parent.handle
            }
        };
        match share.rename(incoming, key, &parent, dir.name()).await {
            Ok(()) => return Ok(()),
            Err(error) if matches!(error.kind(), Kind::NotFound | Kind::Stale) && attempt < ATTEMPTS => {}
            Err(error) if matches!(error.kind(), Kind::Exists | Kind::NotEmpty) => {
                refuse_content(share, dir).await?;
                return Err(failed(error));
            }
            Err(error) => return Err(failed(error)),
        }
    }
    unreachable!("the attempts end in a return")
}

/// The directory in which a directory is, if both are there.
async fn parent_of(share: &Share, dir: &SubPath) -> Result<Option<Handle>> {
    if find_dir(share, dir.as_str()).await?.is_none() {
        return Ok(None);
    }
    match dir.parent() {
        None => Ok(Some(share.root())),
        Some(parent) => Ok(find_dir(share, parent.as_str()).await?.map(|entry| entry.handle)),
    }
}

/// Removes the directories above a removed one, up to the first that has something else in it.
pub(super) async fn prune(share: &Share, dir: &SubPath) {
    let mut empty = dir.parent();
    while let Some(dir) = empty {
        let above = match dir.parent() {
            None => Ok(share.root()),
            Some(parent) => share.open_dir(parent.as_str()).await.map(|entry| entry.handle),
        };
        let Ok(above) = above else { return };
        if share.remove_dir(&above, dir.name()).await.is_err() {
            return;
        }
        empty = dir.parent();
    }
}
